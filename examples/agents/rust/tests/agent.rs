//! The built agent against a server that answers by script.
#![expect(clippy::unwrap_used, reason = "in a test a failure is a panic")]

use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

const SUM: &str = r#"{"id":"sums-train-000001","expression":"12 + 34","answer":"46"}"#;
const CALCULATION: &str = r#"{"id":"calculator-train-000001","expression":"12 + 34 * 56","answer":"1916"}"#;

/// Answers chat requests with `replies` in turn, keeps connections alive, and notes what came.
struct Server {
    base_url: String,
    notes: Arc<Mutex<Notes>>,
}

#[derive(Default)]
struct Notes {
    replies: VecDeque<(u16, Value)>,
    requests: Vec<Value>,
    connections: usize,
}

impl Server {
    fn start(replies: impl IntoIterator<Item = (u16, Value)>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let base_url = format!("http://{}/v1", listener.local_addr().unwrap());
        let notes = Arc::new(Mutex::new(Notes { replies: replies.into_iter().collect(), ..Notes::default() }));
        let shared = Arc::clone(&notes);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                shared.lock().unwrap().connections += 1;
                serve(&stream.unwrap(), &shared);
            }
        });
        Self { base_url, notes }
    }

    fn requests(&self) -> Vec<Value> {
        self.notes.lock().unwrap().requests.clone()
    }
}

/// One connection, until the other side closes it.
fn serve(mut stream: &TcpStream, notes: &Mutex<Notes>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    loop {
        let (mut length, mut head) = (0, String::new());
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            let line = line.trim().to_ascii_lowercase();
            if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
            head.push_str(&line);
            if line.is_empty() {
                break;
            }
        }
        assert!(head.starts_with("post /v1/chat/completions") && head.contains("authorization: bearer sk-1"), "{head}");
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        let (status, reply) = {
            let mut notes = notes.lock().unwrap();
            notes.requests.push(serde_json::from_slice(&body).unwrap());
            notes.replies.pop_front().unwrap_or((500, json!({ "error": "the script is over" })))
        };
        let reply = reply.to_string();
        write!(stream, "HTTP/1.1 {status} X\r\ncontent-length: {}\r\n\r\n{reply}", reply.len()).unwrap();
    }
}

fn text(content: &str) -> (u16, Value) {
    (200, json!({ "choices": [{ "message": { "role": "assistant", "content": content } }] }))
}

fn call(id: &str, arguments: &str) -> (u16, Value) {
    let call = json!({ "id": id, "type": "function", "function": { "name": "calc", "arguments": arguments } });
    (200, json!({ "choices": [{ "message": { "role": "assistant", "content": null, "tool_calls": [call] } }] }))
}

/// Exit code, the lines of standard output, standard error.
fn run(server: &Server, args: &[&str], input: &str) -> (Option<i32>, Vec<Value>, String) {
    let mut agent = Command::new(env!("CARGO_BIN_EXE_starling-agent-rust"))
        .args(args)
        .env_clear()
        .envs([("OPENAI_BASE_URL", server.base_url.as_str()), ("OPENAI_API_KEY", "sk-1"), ("STARLING_MODEL", "tiny")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    agent.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = agent.wait_with_output().unwrap();
    let lines = output.stdout.split(|b| *b == b'\n').filter(|l| !l.is_empty());
    let lines = lines.map(|l| serde_json::from_slice(l).unwrap()).collect();
    (output.status.code(), lines, String::from_utf8_lossy(&output.stderr).into_owned())
}

fn worker_line(server: &Server, episode: &str, task: &str) -> String {
    let task: Value = serde_json::from_str(task).unwrap();
    let line = json!({ "episode": episode, "task": task, "base_url": server.base_url, "api_key": "sk-1",
        "model": "tiny", "seed": 7, "set": "any", "task_id": "any", "purpose": "train" });
    format!("{line}\n")
}

#[test]
fn a_sum_is_one_call_with_the_bare_expression() {
    for (answer, reward) in [("46", 1.0), ("47", 0.0)] {
        let server = Server::start([text(answer)]);
        let (code, lines, stderr) = run(&server, &[], SUM);
        assert_eq!((code, lines), (Some(0), vec![json!({ "reward": reward, "metrics": {} })]), "{stderr}");
        let expected = json!({ "model": "tiny", "messages": [{ "role": "user", "content": "12+34" }] });
        assert_eq!(server.requests(), [expected]);
    }
}

#[test]
fn a_calculation_takes_tool_calls_until_there_is_an_answer() {
    let server = Server::start([call("a", r#"{"x":"34*56"}"#), call("b", r#"{"x":"12+1904"}"#), text("1916")]);
    let (code, lines, stderr) = run(&server, &[], CALCULATION);
    let metrics = json!({ "tool_calls": 2.0, "tool_errors": 0.0, "turns": 3.0 });
    assert_eq!((code, lines), (Some(0), vec![json!({ "reward": 1.0, "metrics": metrics })]), "{stderr}");
    let last = &server.requests()[2];
    assert_eq!(last["tools"][0]["function"]["name"], "calc");
    let roles: Vec<_> = last["messages"].as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["user", "assistant", "tool", "assistant", "tool"]);
    assert_eq!(last["messages"][4], json!({ "role": "tool", "tool_call_id": "b", "content": "1916" }));
}

#[test]
fn bad_tool_calls_are_answered_with_error_and_the_turns_are_limited() {
    let bad = ["{", "{}", r#"{"x":"1+2+3"}"#, r#"{"x":"x"}"#];
    let server = Server::start(bad.map(|arguments| call("a", arguments)));
    let (_, lines, _) = run(&server, &[], CALCULATION);
    let metrics = json!({ "tool_calls": 4.0, "tool_errors": 4.0, "turns": 4.0 });
    assert_eq!(lines, [json!({ "reward": 0.0, "metrics": metrics })]);
    assert_eq!(server.requests()[3]["messages"][2]["content"], "error");
}

#[test]
fn a_server_that_is_busy_is_asked_again_and_one_that_refuses_is_not() {
    let server = Server::start([(503, json!({})), text("46")]);
    assert_eq!(run(&server, &[], SUM).0, Some(0));
    let server = Server::start([(400, json!({ "error": "no such model" }))]);
    let (code, lines, stderr) = run(&server, &[], SUM);
    assert_eq!((code, lines.len(), server.requests().len()), (Some(1), 0, 1));
    assert!(stderr.contains("400") && stderr.contains("no such model"), "{stderr}");
}

#[test]
fn a_worker_answers_line_by_line_over_one_connection_and_survives_errors() {
    let server = Server::start([text("46"), (400, json!({ "error": "full" })), text("45")]);
    let input: String = ["a", "b", "c"].map(|episode| worker_line(&server, episode, SUM)).concat();
    let bad = worker_line(&server, "d", r#"{"id":"chess-1"}"#);
    let (code, lines, stderr) = run(&server, &["--worker"], &(input + &bad));
    assert_eq!((code, lines.len()), (Some(0), 4), "{stderr}");
    assert_eq!(lines[0], json!({ "episode": "a", "reward": 1.0, "metrics": {} }));
    assert!(lines[1]["episode"] == "b" && lines[1]["error"].as_str().unwrap().contains("full"), "{}", lines[1]);
    assert_eq!(lines[2]["reward"], 0.0);
    assert!(lines[3]["error"].as_str().unwrap().contains("expected sums or calculator"), "{}", lines[3]);
    assert_eq!(server.notes.lock().unwrap().connections, 1);
}
