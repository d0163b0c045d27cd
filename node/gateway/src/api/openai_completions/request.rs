//! A completion request: every field is honoured or refused by name.

use crate::api::ApiError;
use crate::api::fields::{self, LEAVE_IT_OUT, Stop, StreamOptions, in_range, is_empty, zero};
use crate::request::{CHOICES_MAX, Prompt, Settings};
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, SeqAccess, Visitor};
use serde_json::Value;
use std::borrow::Cow;
use std::fmt;

/// Most prompts in a request: each is a call of its own.
const PROMPTS_MAX: usize = 64;
/// Most answers to a request, of all its prompts together.
const ANSWERS_MAX: usize = 128;
const STOPS_MAX: usize = 4;
/// What OpenAI's API gives where the length is left out.
const MAX_TOKENS_DEFAULT: u32 = 16;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CompletionRequest<'a> {
    #[serde(borrow)]
    model: Cow<'a, str>,
    #[serde(borrow)]
    prompt: Prompts<'a>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    max_tokens: Option<u32>,
    stop: Option<Stop>,
    seed: Option<i64>,
    n: Option<u32>,
    best_of: Option<u32>,
    echo: Option<bool>,
    logprobs: Option<u8>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    #[serde(rename = "user")]
    _user: Option<IgnoredAny>,
    // Not honoured; the value that changes nothing is let through.
    suffix: Option<Value>,
    presence_penalty: Option<Value>,
    frequency_penalty: Option<Value>,
    logit_bias: Option<Value>,
}

/// One prompt or several, as texts or as token ids.
#[derive(Debug)]
struct Prompts<'a>(Vec<Prompt<'a>>);

impl<'de: 'a, 'a> Deserialize<'de> for Prompts<'a> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Element<'a> {
            Id(u32),
            Text(#[serde(borrow)] Cow<'a, str>),
            Ids(Vec<u32>),
        }
        const EXPECTED: &str = "a text, a list of texts, a list of token ids, or a list of lists of token ids";
        struct Shapes;
        impl<'de> Visitor<'de> for Shapes {
            type Value = Prompts<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(EXPECTED)
            }
            fn visit_borrowed_str<E>(self, s: &'de str) -> Result<Self::Value, E> {
                Ok(Prompts(vec![Prompt::Text(s.into())]))
            }
            fn visit_str<E>(self, s: &str) -> Result<Self::Value, E> {
                Ok(Prompts(vec![Prompt::Text(s.to_owned().into())]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let (mut prompts, mut ids) = (Vec::new(), Vec::new());
                let mixed = || serde::de::Error::custom(format!("expected {EXPECTED}, got a mixture"));
                while let Some(element) = seq.next_element()? {
                    match element {
                        Element::Id(id) if prompts.is_empty() => ids.push(id),
                        Element::Text(text) if ids.is_empty() => prompts.push(Prompt::Text(text)),
                        Element::Ids(list) if ids.is_empty() => prompts.push(Prompt::Tokens(list)),
                        _ => return Err(mixed()),
                    }
                }
                if !ids.is_empty() {
                    prompts.push(Prompt::Tokens(ids));
                }
                let texts = prompts.iter().filter(|p| matches!(p, Prompt::Text(_))).count();
                if texts > 0 && texts < prompts.len() { Err(mixed()) } else { Ok(Prompts(prompts)) }
            }
        }
        d.deserialize_any(Shapes)
    }
}

/// What concerns the form of the answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Options {
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    /// The prompts' texts, to be shown before each answer.
    pub(super) echo: Option<Vec<String>>,
    /// How many alternatives to each token, where logprobs are wanted.
    pub(super) logprobs: Option<u8>,
}

pub(super) struct Checked<'a> {
    pub(super) model: Cow<'a, str>,
    pub(super) prompts: Vec<Prompt<'a>>,
    pub(super) settings: Settings,
    pub(super) options: Options,
}

impl<'a> CompletionRequest<'a> {
    pub(super) fn parse(body: &'a [u8]) -> Result<Self, ApiError> {
        fields::parse(body)
    }

    pub(super) fn check(self) -> Result<Checked<'a>, ApiError> {
        fields::refuse(&[
            ("suffix", &self.suffix, |v| v == "", "text is gone on with, never filled in"),
            ("presence_penalty", &self.presence_penalty, zero, LEAVE_IT_OUT),
            ("frequency_penalty", &self.frequency_penalty, zero, LEAVE_IT_OUT),
            ("logit_bias", &self.logit_bias, is_empty, LEAVE_IT_OUT),
        ])?;
        let prompts = self.prompt.0;
        let expected = format!("1 to {PROMPTS_MAX} prompts");
        in_range("prompt", (), (1..=PROMPTS_MAX).contains(&prompts.len()), &expected)?;
        let choices = self.n.unwrap_or(1);
        in_range("n", choices, (1..=CHOICES_MAX).contains(&choices), "1 to 16")?;
        let answers = prompts.len() * choices as usize;
        let expected = format!("at most {ANSWERS_MAX} answers, and these are {answers}");
        in_range("n", (), answers <= ANSWERS_MAX, &expected)?;
        if self.best_of.is_some_and(|n| n != choices) {
            return Err(ApiError::unsupported("best_of", "every answer is returned; ask for more with `n`"));
        }
        let logprobs = self.logprobs;
        in_range("logprobs", (), logprobs.is_none_or(|n| n <= 5), "0 to 5")?;
        let echo = if self.echo == Some(true) {
            if logprobs.is_some() {
                let why = "the prompt's own logprobs are not computed; ask for one of `echo` and `logprobs`";
                return Err(ApiError::unsupported("echo", why));
            }
            let text = |p: &Prompt<'_>| match p {
                Prompt::Text(text) => Ok(text.to_string()),
                _ => Err(ApiError::unsupported("echo", "only prompts that are texts are shown again")),
            };
            Some(prompts.iter().map(text).collect::<Result<_, _>>()?)
        } else {
            None
        };
        let stream = self.stream.unwrap_or(false);
        let include_usage = StreamOptions::check(self.stream_options, stream)?;
        let settings = Settings {
            temperature: fields::temperature(self.temperature, 2)?,
            top_p: fields::top_p(self.top_p)?,
            top_k: fields::top_k(self.top_k)?,
            max_tokens: fields::max_tokens("max_tokens", self.max_tokens)?,
            open_max_tokens: Some(MAX_TOKENS_DEFAULT),
            stops: fields::stops("stop", self.stop.unwrap_or_default().0, STOPS_MAX)?,
            seed: fields::seed(self.seed),
            choices,
            logprobs: logprobs.is_some(),
            top_logprobs: logprobs.unwrap_or(0),
            ..Settings::default()
        };
        let options = Options { stream, include_usage, echo, logprobs };
        Ok(Checked { model: self.model, prompts, settings, options })
    }
}
