//! Whatever is wrong with what people, programs and agents hand in is named, and costs nothing else.

use anyhow::{Context, ensure};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use starling_bootstrap::identity::Identity;
use starling_bootstrap::ticket::Ticket;
use starling_protocol::Hash;
use starling_tests::{Job, MODEL, Role, TestMesh, agent_binary, starling, until};
use std::fmt::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);
/// Promise 5: every wait has its reason within this time.
const TOLD_WITHIN: Duration = Duration::from_secs(5);

fn a_ticket(addresses: &[&str]) -> anyhow::Result<String> {
    let node = Identity::from_seed([7; 32]).node_id();
    let addresses = addresses.iter().map(|a| (*a).to_owned()).collect();
    let nodes = vec![(node, addresses)];
    let ticket = Ticket { mesh: "test".into(), network: Hash::of(b"test"), nodes, expires_ms: None };
    Ok(ticket.encode()?)
}

#[tokio::test]
async fn the_command_line_refuses_and_names_what_is_wrong() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().display().to_string();
    let good = a_ticket(&["/ip4/127.0.0.1/tcp/1"])?;
    let cut = &good[..good.len() - 8];
    let typo = format!("{}{}{}", &good[..30], if &good[30..31] == "a" { "b" } else { "a" }, &good[31..]);
    let cases: [(&[&str], &[&str]); 22] = [
        (&["join", "hello"], &["ticket", "start with `starling1`", "hello"]),
        (&["join", "starling1ab1c"], &["ticket", "character 12", "'1'"]),
        (&["join", cut], &["ticket", "cut off"]),
        (&["join", &typo], &["ticket", "checksum"]),
        (&["join", &good, "--role", "boss"], &["--role", "server, client or witness", "boss"]),
        (&["node", "run", "--role", "server,boss"], &["--role", "boss"]),
        (&["node", "run", "--http", "nowhere"], &["--http nowhere", "ADDRESS:PORT"]),
        (&["node", "run", "--http", "127.0.0.1:99999"], &["--http 127.0.0.1:99999"]),
        (&["node", "run", "--http", "0.0.0.0:0"], &["--http 0.0.0.0:0", "--http-token"]),
        (&["node", "run", "--listen", "127.0.0.1:1"], &["--listen 127.0.0.1:1", "multiaddr"]),
        (&["node", "run", "--slots", "0", "--role", "client"], &["--slots", "1 to 1024", "0"]),
        (&["node", "run", "--slots", "many"], &["--slots", "many"]),
        (&["node", "run", "--agent", "./agent"], &["--agent", "--role client"]),
        (&["join", &good, "--role", "client", "--agent", ""], &["--agent"]),
        (&["node", "run", "--models", "a b"], &["--models", "a b"]),
        (&["node", "run", "--model", "nowhere.gguf"], &["--model nowhere.gguf"]),
        (&["node", "run", "--model", "a b=/"], &["--model a b=/", "NAME="]),
        (&["node", "run", "--role", "witness", "--model", "/"], &["--model", "--role server"]),
        (&["node", "run", "--weight-format", "q4"], &["--weight-format", "f32 or q8_0", "q4"]),
        (&["bench", "generate"], &["--model PATH"]),
        (&["node", "dance"], &["dance"]),
        (&["demo", "--steps", "1", "--report", &data], &["--steps", "at least 2"]),
    ];
    for (arguments, words) in cases {
        let started = Instant::now();
        let output = starling(&[&["--data", &data], arguments].concat()).await?;
        output.ensure_refused(words).with_context(|| format!("starling {}", arguments.join(" ")))?;
        ensure!(started.elapsed() < LIMIT, "{arguments:?} took {:?}", started.elapsed());
    }
    let output = starling(&["--data", &data, "status"]).await?;
    ensure!(output.code == Some(1) && output.stderr.contains("no node runs"), "{output:?}");
    Ok(())
}

#[tokio::test]
async fn a_ticket_that_is_of_no_use_here_is_bad_input() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().display().to_string();
    let node = Identity::from_seed([7; 32]).node_id();
    let nodes = vec![(node, vec!["/ip4/127.0.0.1/tcp/1".to_owned()])];
    let ticket = |network: &[u8], expires_ms| {
        Ticket { mesh: "test".into(), network: Hash::of(network), nodes: nodes.clone(), expires_ms }.encode()
    };
    let expired = starling(&["--data", &data, "join", &ticket(b"test", Some(1))?, "--http", "127.0.0.1:0"]).await?;
    expired.ensure_refused(&["ticket", "no longer valid"])?;
    ensure!(!folder.path().join("mesh.json").exists(), "a refused ticket leaves nothing behind");
    // A folder that belongs to another mesh.
    let (ours, theirs) = (Hash::of(b"ours"), Hash::of(b"theirs"));
    std::fs::write(folder.path().join("mesh.json"), json!({ "network": ours, "nodes": [] }).to_string())?;
    let foreign = starling(&["--data", &data, "join", &ticket(b"theirs", None)?, "--http", "127.0.0.1:0"]).await?;
    foreign.ensure_refused(&["ticket", &ours.short().to_string(), &theirs.short().to_string(), "--data"])?;
    Ok(())
}

#[tokio::test]
async fn a_job_file_is_refused_with_its_field_and_line() -> anyhow::Result<()> {
    let mut mesh = TestMesh::new("bad-jobs")?;
    mesh.add("server-1", Role::Server).await?;
    let root = mesh.root().to_owned();
    std::fs::write(root.join("bad-id.jsonl"), "{\"id\":\"a\"}\n{\"name\":\"b\"}\n")?;
    std::fs::write(root.join("bad-json.jsonl"), "{\"id\":\"a\"}\n\n{\"id\":\n")?;
    std::fs::write(root.join("twice.jsonl"), "{\"id\":\"a\"}\n{\"id\":\"b\"}\n{\"id\":\"a\"}\n")?;
    std::fs::write(root.join("empty.jsonl"), "\n")?;
    let good = Job::tiny("bad", 1).toml();
    let line_of = |text: &str, word: &str| text.lines().position(|l| l.contains(word)).map_or(0, |i| i + 1);
    let tasks = |file: &str| {
        let start = good.find("train = ").map_or(good.len(), |at| at);
        format!("{}train = {file:?}\n", &good[..start])
    };
    let unknown = good.replace("[trainer]\n", "[trainer]\nlearning_rte = 1\n");
    let wrong_kind = good.replace("steps = 1\n", "steps = \"many\"\n");
    let not_toml = good.replace("seed = 1\n", "seed = = 1\n");
    let at = |text: &str, word: &str| format!("line {}", line_of(text, word));
    let cases = [
        (unknown.clone(), vec!["learning_rte".to_owned(), at(&unknown, "learning_rte")]),
        (wrong_kind.clone(), vec!["steps".into(), at(&wrong_kind, "many")]),
        (not_toml.clone(), vec![at(&not_toml, "= =")]),
        (good.replace("group_size = 2", "group_size = 1"), vec!["`group_size`".into(), "2 to 256, got 1".into()]),
        (good.replace("max_tokens = 24", "temperature = 9"), vec!["`sampling.temperature`".into(), "got 9".into()]),
        (good.replace("1e-5", "nan"), vec!["`trainer.learning_rate`".into(), "NaN".into()]),
        (good.replace("steps = 1\n", ""), vec!["steps".into()]),
        (good.replace(MODEL, "a b"), vec!["name".into(), "a b".into()]),
        (
            good.replace(&format!("name = {MODEL:?}"), "name = \"x\"\npath = \"nowhere\""),
            vec!["model.path".into(), "nowhere".into()],
        ),
        (tasks("none.jsonl"), vec!["none.jsonl".into(), "cannot read".into()]),
        (tasks("bad-id.jsonl"), vec!["bad-id.jsonl".into(), "line 2".into(), "id".into()]),
        (tasks("bad-json.jsonl"), vec!["bad-json.jsonl".into(), "line 3".into()]),
        (tasks("twice.jsonl"), vec!["twice.jsonl".into(), "line 3".into(), "line 1".into()]),
        (tasks("empty.jsonl"), vec!["empty.jsonl".into(), "no tasks".into()]),
    ];
    let mut wrong = String::new();
    for (i, (text, words)) in cases.iter().enumerate() {
        ensure!(*text != good, "case {i} changes nothing");
        let file = root.join(format!("job-{i}.toml"));
        std::fs::write(&file, text)?;
        let file = file.display().to_string();
        let output = mesh[0].cli(&["job", "submit", &file]).await?;
        let mut words: Vec<&str> = words.iter().map(String::as_str).collect();
        words.push(&file);
        if let Err(e) = output.ensure_refused(&words) {
            writeln!(wrong, "case {i}: {e:#}")?;
        }
    }
    ensure!(wrong.is_empty(), "{wrong}");
    let missing = mesh[0].cli(&["job", "submit", "/nowhere/job.toml"]).await?;
    missing.ensure_refused(&["/nowhere/job.toml"])?;
    for arguments in [["job", "stop", "12"], ["rollout", "list", "xyz"], ["rollout", "show", "12"]] {
        mesh[0].cli(&arguments).await?.ensure_refused(&["hexadecimal digits", arguments[2]])?;
    }
    let jobs = mesh[0].cli_json(&["job", "list"]).await?;
    ensure!(jobs["jobs"] == json!([]), "no job came of it: {jobs}");
    mesh.passed();
    Ok(())
}

/// A server alone with a job, so that it has the model and episodes to give.
async fn lone_server(name: &str) -> anyhow::Result<TestMesh> {
    let mut mesh = TestMesh::new(name)?;
    mesh.add("server-1", Role::Server).await?;
    mesh.submit(0, &Job::tiny(name, 1000)).await?;
    until("the model is served", LIMIT, async || {
        let status = mesh[0].admin("/status").await.map_err(|e| format!("{e:#}"))?;
        if status["serving"][0]["model"] == MODEL { Ok(()) } else { Err(status["doing"].to_string()) }
    })
    .await?;
    Ok(mesh)
}

#[tokio::test]
async fn a_model_that_cannot_be_used_is_refused_before_it_is_on_the_mesh() -> anyhow::Result<()> {
    let mesh = lone_server("bad-models").await?;
    let root = mesh.root();
    let broken = |name: &str, file: &str, content: &[u8]| -> anyhow::Result<std::path::PathBuf> {
        let folder = root.join(name);
        std::fs::create_dir(&folder)?;
        for entry in std::fs::read_dir(root.join("good"))? {
            let entry = entry?;
            std::fs::copy(entry.path(), folder.join(entry.file_name()))?;
        }
        std::fs::write(folder.join(file), content)?;
        Ok(folder)
    };
    let good = root.join("good").display().to_string();
    mesh[0].cli_json(&["checkpoint", "export", MODEL, "--out", &good]).await?;
    let cut = root.join("cut.gguf");
    std::fs::write(&cut, b"GGUF\x03\0\0\0\x01")?;
    let text = root.join("text.gguf");
    std::fs::write(&text, b"# not a model")?;
    let cases = [
        (broken("template", "chat_template.jinja", b"{% for m in messages %}")?, vec!["chat template: syntax error"]),
        (broken("tokenizer", "tokenizer.json", b"{}")?, vec!["tokenizer.json"]),
        (broken("weights", "model.safetensors", b"short")?, vec!["model.safetensors"]),
        (broken("config", "config.json", b"{\"model_type\": \"mamba\"}")?, vec!["model_type", "mamba"]),
        (cut, vec!["cut.gguf"]),
        (text, vec!["text.gguf"]),
    ];
    let mut wrong = String::new();
    for (i, (path, mut words)) in cases.into_iter().enumerate() {
        let path = path.display().to_string();
        words.push(&path);
        // The node tells it and ends; it has no model of that name then.
        let data = root.join(format!("node-{i}")).display().to_string();
        let model = format!("theirs={path}");
        let output = starling(&["--data", &data, "node", "run", "--http", "127.0.0.1:0", "--model", &model]).await?;
        if let Err(e) = output.ensure_refused(&words) {
            writeln!(wrong, "--model {path}: {e:#}")?;
        }
        let job = Job::tiny("theirs", 1)
            .toml()
            .replace(&format!("name = {MODEL:?}"), &format!("name = \"theirs\"\npath = {path:?}"));
        let file = root.join(format!("job-{i}.toml"));
        std::fs::write(&file, job)?;
        let output = mesh[0].cli(&["job", "submit", &file.display().to_string()]).await?;
        words.push("model.path");
        if let Err(e) = output.ensure_refused(&words) {
            writeln!(wrong, "model.path {path}: {e:#}")?;
        }
    }
    ensure!(wrong.is_empty(), "{wrong}");
    let status = mesh[0].admin("/status").await?;
    ensure!(!status["models"].to_string().contains("theirs"), "{status}");
    mesh.passed();
    Ok(())
}

/// Checks OpenAI's error object.
fn ensure_error(got: &(StatusCode, Value), status: u16, code: &str, param: Option<&str>) -> Result<(), String> {
    let error = &got.1["error"];
    let texts = error["message"].as_str().is_some_and(|m| !m.is_empty()) && error["type"].is_string();
    let same = got.0.as_u16() == status && error["code"] == code && error["param"] == json!(param);
    if same && texts { Ok(()) } else { Err(format!("expected {status} {code} {param:?}, got {} {}", got.0, got.1)) }
}

#[tokio::test]
async fn bad_bodies_are_refused_in_openais_shape() -> anyhow::Result<()> {
    let mesh = lone_server("bad-bodies").await?;
    let node = &mesh[0];
    let chat = |change: &dyn Fn(&mut Value)| {
        let mut body = json!({ "model": MODEL, "messages": [{ "role": "user", "content": "1+2" }], "max_tokens": 4 });
        change(&mut body);
        body.to_string()
    };
    let set = |field: &str, value: Value| chat(&|b| b[field] = value.clone());
    let cases = [
        ("not json".to_owned(), 400, "invalid_json", None),
        ("{\"model\": \"x\"".into(), 400, "invalid_json", None),
        (
            chat(&|b| drop(b.as_object_mut().map(|o| o.remove("messages")))),
            400,
            "missing_required_parameter",
            Some("messages"),
        ),
        (set("messages", json!("hi")), 400, "invalid_value", Some("messages")),
        (set("messages", json!([])), 400, "invalid_value", Some("messages")),
        (set("messages", json!([{ "role": "boss", "content": "hi" }])), 400, "invalid_value", Some("messages[0].role")),
        (set("temperature", json!(9)), 400, "invalid_value", Some("temperature")),
        (set("top_p", json!(0)), 400, "invalid_value", Some("top_p")),
        (set("n", json!("two")), 400, "invalid_value", Some("n")),
        (set("n", json!(1000)), 400, "invalid_value", Some("n")),
        (set("max_tokens", json!(-1)), 400, "invalid_value", Some("max_tokens")),
        (set("top_logprobs", json!(99)), 400, "invalid_value", Some("top_logprobs")),
        (set("presence_penalty", json!(0.5)), 400, "unsupported_parameter", Some("presence_penalty")),
        (set("logit_bias", json!({ "5": 1 })), 400, "unsupported_parameter", Some("logit_bias")),
        (
            set("response_format", json!({ "type": "json_object" })),
            400,
            "unsupported_parameter",
            Some("response_format"),
        ),
        (set("made_up", json!(1)), 400, "unknown_parameter", Some("made_up")),
        (set("model", json!("nobody")), 404, "model_not_found", Some("model")),
        (
            set("messages", json!([{ "role": "user", "content": "9".repeat(5000) }])),
            400,
            "context_length_exceeded",
            Some("messages"),
        ),
    ];
    let mut wrong = String::new();
    for (body, status, code, param) in cases {
        let shown: String = body.chars().take(160).collect();
        let got = node.call(Method::POST, "/v1/chat/completions", None, body).await?;
        if let Err(e) = ensure_error(&got, status, code, param) {
            writeln!(wrong, "{shown}: {e}")?;
        }
    }
    let got = node.call(Method::POST, "/v1/chat/completions", None, " ".repeat((8 << 20) + 1)).await?;
    if let Err(e) = ensure_error(&got, 413, "body_too_long", None) {
        writeln!(wrong, "8 MiB and one: {e}")?;
    }
    let got = node.call(Method::POST, "/v1/chat/completions", Some("sk-starling-no"), chat(&|_| ())).await?;
    if let Err(e) = ensure_error(&got, 401, "invalid_api_key", None) {
        writeln!(wrong, "a foreign key: {e}")?;
    }
    for (body, code, param) in [
        (json!({ "modell": MODEL }), "unknown_parameter", Some("modell")),
        (json!({ "job": 5 }), "invalid_value", Some("job")),
        (json!([]), "invalid_json", None),
    ] {
        let got = node.call(Method::POST, "/v1/episodes", None, body.to_string()).await?;
        // A list is a wrong body, whatever it is called.
        let code =
            if param.is_none() { got.1["error"]["code"].as_str().unwrap_or(code).to_owned() } else { code.into() };
        if let Err(e) = ensure_error(&got, 400, &code, param) {
            writeln!(wrong, "episodes {body}: {e}")?;
        }
    }
    ensure!(wrong.is_empty(), "{wrong}");
    for route in ["/starling/v1/status", "/starling/v1/nodes"] {
        for key in [None, Some("st-guessed")] {
            let (status, body) = node.call(Method::GET, route, key, "").await?;
            ensure!(
                status == StatusCode::UNAUTHORIZED && body["error"]["message"].is_string(),
                "{route}: {status} {body}"
            );
        }
    }
    // After all that, a good one is answered.
    let (status, body) = node.call(Method::POST, "/v1/chat/completions", None, chat(&|_| ())).await?;
    ensure!(status.is_success() && body["choices"][0]["message"]["content"].is_string(), "{status} {body}");
    mesh.passed();
    Ok(())
}

#[tokio::test]
async fn a_refused_end_leaves_the_episode_open() -> anyhow::Result<()> {
    let mesh = lone_server("bad-ends").await?;
    let node = &mesh[0];
    // Until the job is known everywhere the answer is 503 with a reason, which is what `Retry-After` is for.
    let begun = until("an episode begins", LIMIT, async || {
        let sent = node.call(Method::POST, "/v1/episodes", None, "{}").await;
        let (status, begun) = sent.map_err(|e| format!("{e:#}"))?;
        if status.is_success() { Ok(begun) } else { Err(format!("{status} {begun}")) }
    })
    .await?;
    let text = |field: &str| begun[field].as_str().map(str::to_owned).with_context(|| format!("{field} in {begun}"));
    let (episode, key, task) = (text("episode")?, text("api_key")?, text("task_id")?);
    let body = json!({ "model": MODEL, "messages": [{ "role": "user", "content": "12+34" }] }).to_string();
    let (status, answer) = node.call(Method::POST, "/v1/chat/completions", Some(&key), body).await?;
    ensure!(status.is_success(), "{status} {answer}");

    let route = format!("/v1/episodes/{episode}/end");
    let open = async || -> anyhow::Result<bool> {
        let (_, list) = node.call(Method::GET, "/v1/episodes", Some(&key), "").await?;
        Ok(list["data"][0]["state"] == "open" && list["data"][0]["turns"] == 1)
    };
    ensure!(open().await?, "the episode is open with its one turn");
    let mut wrong = String::new();
    for (body, code, param) in [
        ("{\"reward\": NaN}".to_owned(), "invalid_value", Some("reward")),
        ("{\"reward\": 1e400}".into(), "invalid_value", Some("reward")),
        ("{\"reward\": 1".into(), "invalid_json", None),
        (json!({ "reward": 1e39 }).to_string(), "not_finite", Some("reward")),
        (json!({ "reward": "high" }).to_string(), "invalid_value", Some("reward")),
        (json!({ "reward": null }).to_string(), "invalid_value", Some("reward")),
        ("{}".into(), "missing_required_parameter", Some("reward")),
        (json!({ "reward": 1, "metrics": { "m": -1e39 } }).to_string(), "not_finite", Some("metrics.m")),
        (json!({ "reward": 1, "rewards": [1] }).to_string(), "unknown_parameter", Some("rewards")),
        (json!({ "reward": 1, "task_id": "nobody's" }).to_string(), "wrong_task", Some("task_id")),
    ] {
        let shown = body.clone();
        let got = node.call(Method::POST, &route, Some(&key), body).await?;
        if let Err(e) = ensure_error(&got, 400, code, param) {
            writeln!(wrong, "{shown}: {e}")?;
        }
        ensure!(open().await?, "the episode is open after {shown}");
    }
    let unknown = format!("/v1/episodes/{}/end", "0".repeat(32));
    let got = node.call(Method::POST, &unknown, Some(&key), "{\"reward\": 1}").await?;
    if let Err(e) = ensure_error(&got, 403, "wrong_episode", None) {
        writeln!(wrong, "another episode's end: {e}")?;
    }
    let got = node.call(Method::POST, &route, Some("sk-starling-no"), "{\"reward\": 1}").await?;
    if let Err(e) = ensure_error(&got, 401, "invalid_api_key", None) {
        writeln!(wrong, "a foreign key: {e}")?;
    }
    ensure!(wrong.is_empty(), "{wrong}");

    let end = json!({ "reward": 0.5, "metrics": { "m": 2 }, "task_id": task }).to_string();
    let (status, ended) = node.call(Method::POST, &route, Some(&key), end).await?;
    ensure!(status.is_success(), "{status} {ended}");
    let rollout = ended["rollout"].as_str().context("a rollout's id")?;
    let shown = node.cli_json(&["rollout", "show", rollout]).await?;
    ensure!(shown["rollout"]["reward"] == 0.5 && shown["rollout"]["task"]["id"] == task.as_str(), "{shown}");
    // The first end counts.
    let (status, again) = node.call(Method::POST, &route, Some(&key), "{\"reward\": 1}").await?;
    ensure!(status.is_success() && again["rollout"] == rollout, "{status} {again}");
    let body = json!({ "model": MODEL, "messages": [{ "role": "user", "content": "1+2" }] }).to_string();
    let got = node.call(Method::POST, "/v1/chat/completions", Some(&key), body).await?;
    ensure_error(&got, 409, "episode_ended", None).map_err(anyhow::Error::msg)?;
    mesh.passed();
    Ok(())
}

/// A program that does what the file `mode` beside it says, and is the example agent when it says `good`.
fn moody_agent(folder: &Path) -> anyhow::Result<String> {
    let path = folder.join("agent.sh");
    let text = format!(
        "#!/bin/sh\ncase \"$(cat '{mode}')\" in\n\
         nan) cat >/dev/null; echo '{{\"reward\": NaN}}' ;;\n\
         garbage) cat >/dev/null; echo 'I did well, trust me' ;;\n\
         broken) cat >/dev/null; echo '{{\"reward\": ' ;;\n\
         crash) echo 'the tool shed burns' >&2; exit 3 ;;\n\
         *) exec '{good}' ;;\nesac\n",
        mode = folder.join("mode").display(),
        good = agent_binary()?.display(),
    );
    std::fs::write(&path, text)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    Ok(path.display().to_string())
}

#[tokio::test]
async fn a_broken_agent_costs_its_episodes_and_no_group() -> anyhow::Result<()> {
    let mut mesh = TestMesh::new("bad-agent")?;
    mesh.add("server-1", Role::Server).await?;
    let mode = mesh.root().join("mode");
    std::fs::write(&mode, "nan")?;
    let agent = moody_agent(mesh.root())?;
    let job = mesh.submit(0, &Job { group_size: 4, ..Job::tiny("bad-agent", 2) }).await?;
    let client = mesh.add("client-1", Role::Client { agent, worker: false, slots: 2 }).await?;

    for (what, label, words) in [
        ("nan", "report", vec!["`reward`", "finite number", "NaN"]),
        ("garbage", "report", vec!["I did well, trust me"]),
        ("broken", "report", vec!["expected a JSON object"]),
        ("crash", "exit", vec!["3", "the tool shed burns"]),
    ] {
        std::fs::write(&mode, what)?;
        until(&format!("status names what a program that prints {what} did"), LIMIT, async || {
            let status = mesh[client].cli_json(&["status"]).await.map_err(|e| format!("{e:#}"))?;
            let agents = &status["agents"];
            let failure = agents["last_failure"].as_str().unwrap_or_default();
            let counted = agents["aborted"][label].as_u64().unwrap_or(0) > 0;
            if counted && words.iter().all(|w| failure.contains(w)) { Ok(()) } else { Err(agents.to_string()) }
        })
        .await?;
    }
    ensure!(mesh.version().await == 0, "nothing was trained on episodes that were given up");
    let server = mesh[0].admin(&format!("/models/{MODEL}")).await?;
    ensure!(server["ledger"]["aborted"].as_u64() >= Some(4), "the leader heard of them: {server}");

    std::fs::write(&mode, "good")?;
    mesh.reach(2, LIMIT).await?;
    let steps = mesh[0].admin(&format!("/steps/{MODEL}")).await?;
    ensure!(steps["steps"][0]["consumed"] == 4 && steps["steps"][1]["consumed"] == 4, "whole groups: {steps}");
    let rollouts = mesh[0].cli_json(&["rollout", "list", &job]).await?;
    let of_step = |version: u64| {
        let all = rollouts["rollouts"].as_array().into_iter().flatten();
        all.filter(|r| r["consumed_by"] == version).map(|r| r["task"].to_string()).collect::<Vec<_>>()
    };
    for version in [1, 2] {
        let tasks = of_step(version);
        ensure!(tasks.len() == 4 && tasks.iter().all(|t| *t == tasks[0]), "one task, four times: {tasks:?}");
    }
    mesh.stop_all().await?;
    mesh.read_stores()?.ensure_clean()?;
    mesh.passed();
    Ok(())
}

#[tokio::test]
async fn an_address_that_cannot_be_reached_is_named_with_its_cause() -> anyhow::Result<()> {
    let mut mesh = TestMesh::new("unreachable")?;
    // Nothing listens on the first two; the third is for documentation and leads nowhere.
    let addresses = ["/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/udp/1/quic-v1", "/ip4/192.0.2.1/tcp/4001"];
    let ticket = a_ticket(&addresses)?;
    let node = mesh.add_with_ticket("server-1", Role::Server, Some(ticket)).await;
    let node = node.context("a node whose mesh cannot be reached runs all the same")?;
    until("status names every address and its cause", TOLD_WITHIN, async || {
        let status = mesh[node].cli_json(&["status"]).await.map_err(|e| format!("{e:#}"))?;
        let told = |address: &str| {
            let list = status["unreachable"].as_array().into_iter().flatten();
            list.into_iter().any(|u| {
                let at = u["address"].as_str().unwrap_or_default();
                at.starts_with(address) && u["error"].as_str().is_some_and(|e| !e.is_empty())
            })
        };
        let waits = status["doing"].to_string();
        let refused = status["unreachable"].to_string().contains("connection refused");
        if addresses.iter().all(|a| told(a)) && refused && waits.contains("cannot reach") {
            Ok(())
        } else {
            Err(format!("{} {waits}", status["unreachable"]))
        }
    })
    .await?;
    mesh.passed();
    Ok(())
}
