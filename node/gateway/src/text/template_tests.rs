//! Templates of our own against what Jinja2 makes of them in `transformers` (`tests/goldens/make_chat.py`).

use super::template::ChatTemplate;
use super::*;

const GOLDENS: &str = include_str!("../../../../tests/goldens/chat.json");

#[test]
fn every_feature_renders_as_transformers_renders_it() {
    let goldens: Value = serde_json::from_str(GOLDENS).unwrap();
    let tokens = [("bos_token", "<s>".to_owned()), ("eos_token", "</s>".to_owned())];
    let mut differ = Vec::new();
    let mut count = 0;
    for case in goldens["own"].as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let template = ChatTemplate::compile(goldens["templates"][name].as_str().unwrap(), None, &tokens).unwrap();
        let conversation = case["conversation"].as_str().unwrap();
        let messages: Vec<_> = goldens["conversations"][conversation]
            .as_array()
            .unwrap()
            .iter()
            .map(TemplateValue::from_serialize)
            .collect();
        let tools = if case["tools"] == true {
            TemplateValue::from_serialize(&goldens["tools"])
        } else {
            TemplateValue::from(())
        };
        let got = template.render(&messages, &tools, true).unwrap_or_else(|e| e.to_string());
        let want = case["text"].as_str().unwrap();
        if got != want {
            differ.push(format!("{name}, {conversation}\nexpected {want:?}\ngot      {got:?}"));
        }
        count += 1;
    }
    assert!(count >= 40, "{count} cases");
    assert!(differ.is_empty(), "{}", differ.join("\n\n"));
}

#[test]
fn the_local_date_is_printed_and_a_wrong_format_is_an_error() {
    let render =
        |source: &str| ChatTemplate::compile(source, None, &[]).unwrap().render(&[], &TemplateValue::from(()), true);
    // The day may change between the two.
    let days = || chrono::Local::now().format("%d %b %Y").to_string();
    let (before, got, after) = (days(), render("{{ strftime_now('%d %b %Y') }}").unwrap(), days());
    assert!(got == before || got == after, "{got}");
    let e = render("{{ strftime_now('%Q!') }}").unwrap_err();
    assert_eq!(e, FormatError::Render("strftime_now: no such format: %Q!".into()));
}
