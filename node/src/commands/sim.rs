//! `starling sim`: whole meshes in virtual time.

use crate::cli::SimArgs;
use crate::{BadInput, print};
use anyhow::{Context, anyhow};
use serde::Serialize;
use starling_protocol::Hash;
use starling_simulations::scenario::{self, library};
use starling_simulations::{Load, Outcome, Scenario, Violation, replays, report, run, run_all};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

/// What a series of runs came to.
#[derive(Debug, Serialize)]
struct Summary {
    /// As `A..B`, both ends included.
    seeds: String,
    runs: usize,
    events: u64,
    violations: Vec<Found>,
    /// Of one run its own; of several, blake3 over them in order.
    trace_hash: Hash,
    wall_s: f64,
    virtual_s: f64,
    /// Of each run: from a death that lasted to all others knowing it, in seconds.
    detected_in_s: Vec<Option<f64>>,
    /// Of each run: from the heal to convergence, in seconds.
    healed_in_s: Vec<Option<f64>>,
    /// Of each run: what a node sends in a second of the quiet time before the first fault.
    steady: Vec<Option<Load>>,
    /// Of each run: the same over all of it, joining, faults and healing included.
    whole_run: Vec<Option<Load>>,
    steps: u64,
    acknowledged: u64,
    consumed: u64,
    crashes: u64,
}

/// A violation with what reproduces it.
#[derive(Debug, Serialize)]
struct Found {
    scenario: String,
    seed: u64,
    #[serde(flatten)]
    violation: Violation,
    reproduce: String,
}

/// Seeds from `A..B`, both ends included, or a single number.
fn seeds(text: &str) -> anyhow::Result<(u64, u64)> {
    let number = |s: &str| {
        s.trim().parse::<u64>().map_err(|_not_one| BadInput::wrap(anyhow!("`--seeds`: expected A..B, got {text:?}")))
    };
    let (a, b) = match text.split_once("..") {
        Some((a, b)) => (number(a)?, number(b.trim_start_matches('='))?),
        None => (number(text)?, number(text)?),
    };
    if b < a {
        return Err(BadInput::wrap(anyhow!("`--seeds`: expected A..B with A not above B, got {text:?}")));
    }
    Ok((a, b))
}

/// A file, or the name of a scenario of the library.
fn load(what: &str) -> anyhow::Result<(Arc<Scenario>, String)> {
    let text = match library::text(what) {
        Some(text) => text.to_owned(),
        None if Path::new(what).exists() => {
            std::fs::read_to_string(what).with_context(|| format!("cannot read {what}")).map_err(BadInput::wrap)?
        }
        None => {
            let known: Vec<&str> = library::ALL.iter().chain(library::SCALE).map(|(n, _)| *n).collect();
            let why = anyhow!("expected a scenario file or one of {}, got {what:?}", known.join(", "));
            return Err(BadInput::wrap(why));
        }
    };
    let scenario = scenario::parse(&text).map_err(|e| BadInput::wrap(anyhow!("{what}: {e}")))?;
    Ok((Arc::new(scenario), what.to_owned()))
}

fn list(json: bool) -> anyhow::Result<ExitCode> {
    let all: Vec<serde_json::Value> = library::ALL
        .iter()
        .chain(library::SCALE)
        .filter_map(|(_, text)| scenario::parse(text).ok())
        .map(|s| serde_json::json!({ "name": s.name, "about": s.about, "nodes": s.node_names().len() }))
        .collect();
    print(json, &all, || {
        let line = |s: &serde_json::Value| {
            format!(
                "{:<18} {:>6} nodes  {}",
                s["name"].as_str().unwrap_or(""),
                s["nodes"],
                s["about"].as_str().unwrap_or("")
            )
        };
        all.iter().map(line).collect::<Vec<_>>().join("\n")
    })?;
    Ok(ExitCode::SUCCESS)
}

/// `sim`. Exit code 1 when a property was broken.
///
/// # Errors
/// For a scenario or a range of seeds that cannot be.
pub fn sim(args: &SimArgs, json: bool) -> anyhow::Result<ExitCode> {
    if args.list {
        return list(json);
    }
    if let Some(name) = &args.show {
        let text = library::text(name)
            .ok_or_else(|| BadInput::wrap(anyhow!("no scenario of the library is called {name:?}")))?;
        print(json, &text, || text.trim_end().to_owned())?;
        return Ok(ExitCode::SUCCESS);
    }
    let (from, to) = seeds(&args.seeds)?;
    let (scenarios, said) = match &args.scenario {
        Some(what) => {
            let (scenario, said) = load(what)?;
            (vec![scenario], Some(said))
        }
        None => (library::all(), None),
    };
    let plan: Vec<(Arc<Scenario>, u64)> = if args.every {
        (from..=to).flat_map(|seed| scenarios.iter().map(move |s| (s.clone(), seed))).collect()
    } else {
        // Seeds are dealt to the scenarios in turn, so that any long enough range runs them all.
        let count = scenarios.len() as u64;
        let turn = |seed: u64| usize::try_from(seed % count).unwrap_or_default();
        (from..=to).map(|seed| (scenarios[turn(seed)].clone(), seed)).collect()
    };
    let started = Instant::now();
    let outcomes = match (&args.report, plan.as_slice()) {
        (Some(dir), [(scenario, seed)]) => {
            let outcome = run(scenario, *seed, true);
            report::write(dir, scenario, &outcome).with_context(|| format!("cannot write {}", dir.display()))?;
            if !json {
                eprintln!("report: {}", dir.join("index.html").display());
            }
            vec![outcome]
        }
        (Some(_), runs) => {
            let why = anyhow!("`--report`: expected one run, this is {}: name a scenario and one seed", runs.len());
            return Err(BadInput::wrap(why));
        }
        (None, _) => {
            let threads =
                args.threads.or_else(|| std::thread::available_parallelism().ok().map(Into::into)).unwrap_or(1);
            run_all(&plan, threads, |o| {
                if !json && (plan.len() <= 50 || !o.violations.is_empty()) {
                    eprintln!("{}", line(o));
                }
                o.violations.is_empty() || args.keep_going
            })
        }
    };
    let mut found = outcomes.iter().flat_map(|o| found(o, said.as_deref())).collect::<Vec<_>>();
    if args.twice {
        for (scenario, seed) in &plan {
            let (a, b) = replays(scenario, *seed);
            if a != b {
                let conflict = format!("two runs left the traces {a} and {b}");
                let violation = Violation { invariant: "I12 same seed, same trace", at_s: 0.0, event: 0, conflict };
                found.push(Found {
                    scenario: scenario.name.clone(),
                    seed: *seed,
                    violation,
                    reproduce: reproduce(said.as_deref().unwrap_or(&scenario.name), *seed),
                });
            }
        }
    }
    let summary = summary(from, to, &outcomes, found, started);
    let broken = !summary.violations.is_empty();
    print(json, &summary, || text(&summary))?;
    Ok(if broken { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn reproduce(scenario: &str, seed: u64) -> String {
    format!("starling sim {scenario} --seeds {seed} --report report")
}

fn found(o: &Outcome, said: Option<&str>) -> Vec<Found> {
    let reproduce = reproduce(said.unwrap_or(&o.scenario), o.seed);
    let found = |v: &Violation| Found {
        scenario: o.scenario.clone(),
        seed: o.seed,
        violation: v.clone(),
        reproduce: reproduce.clone(),
    };
    o.violations.iter().map(found).collect()
}

fn summary(from: u64, to: u64, outcomes: &[Outcome], violations: Vec<Found>, started: Instant) -> Summary {
    let trace_hash = match outcomes {
        [one] => one.trace,
        many => Hash::of(&many.iter().flat_map(|o| o.trace.0).collect::<Vec<u8>>()),
    };
    let sum = |f: fn(&Outcome) -> u64| outcomes.iter().map(f).sum();
    Summary {
        seeds: format!("{from}..{to}"),
        runs: outcomes.len(),
        events: sum(|o| o.events),
        violations,
        trace_hash,
        wall_s: started.elapsed().as_secs_f64(),
        virtual_s: outcomes.iter().map(|o| o.virtual_time.as_secs_f64()).sum(),
        detected_in_s: outcomes.iter().map(|o| o.detected_in.map(|d| d.as_secs_f64())).collect(),
        healed_in_s: outcomes.iter().map(|o| o.healed_in.map(|d| d.as_secs_f64())).collect(),
        steady: outcomes.iter().map(|o| o.steady).collect(),
        whole_run: outcomes.iter().map(|o| o.whole_run).collect(),
        steps: sum(|o| o.counts.steps),
        acknowledged: sum(|o| o.counts.acknowledged),
        consumed: sum(|o| o.counts.consumed),
        crashes: sum(|o| o.counts.crashes),
    }
}

fn line(o: &Outcome) -> String {
    let c = &o.counts;
    let verdict = match (o.violations.first(), o.healed_in) {
        (Some(v), _) => format!("BROKEN at {:.3} s: {}: {}", v.at_s, v.invariant, v.conflict),
        (None, Some(healed)) => format!("holds; converged {:.1} s after the heal", healed.as_secs_f64()),
        (None, None) => "holds".to_owned(),
    };
    let figures = figures(o.detected_in.map(|d| d.as_secs_f64()), o.steady, o.whole_run);
    format!(
        "{:<16} seed {:<6} {:>8} events {:>4} steps {:>5} acknowledged {:>3} crashes  {verdict}{figures}",
        o.scenario, o.seed, o.events, c.steps, c.acknowledged, c.crashes
    )
}

/// What tells how a mesh behaves as it grows.
fn figures(detected_in_s: Option<f64>, steady: Option<Load>, whole_run: Option<Load>) -> String {
    let death = detected_in_s.map_or_else(String::new, |d| format!("; a death was known to all in {d:.1} s"));
    let load = |l: Load| format!("{:.1} messages and {:.0} bytes a second", l.messages, l.bytes);
    let steady = steady.map_or_else(String::new, |l| format!("; a node sends {} before the first fault", load(l)));
    let whole_run = whole_run.map_or_else(String::new, |l| format!("; {} over the whole run", load(l)));
    format!("{death}{steady}{whole_run}")
}

fn text(s: &Summary) -> String {
    let mut out = format!(
        "seeds {}: {} runs, {} events, {:.0} virtual seconds in {:.1} s; {} steps, {} rollouts acknowledged, {} consumed, \
         {} crashes; trace {}",
        s.seeds, s.runs, s.events, s.virtual_s, s.wall_s, s.steps, s.acknowledged, s.consumed, s.crashes, s.trace_hash
    );
    if let ([detected], [healed], [steady], [whole_run]) =
        (&*s.detected_in_s, &*s.healed_in_s, &*s.steady, &*s.whole_run)
    {
        let healed =
            healed.map_or_else(|| "not converged".to_owned(), |h| format!("converged {h:.1} s after the heal"));
        out.push_str(&format!("\n{healed}{}", figures(*detected, *steady, *whole_run)));
    }
    for f in &s.violations {
        let v = &f.violation;
        out.push_str(&format!(
            "\nBROKEN: {}\n  {} seed {}, event {}, {:.3} s\n  {}\n  reproduce: {}",
            v.invariant, f.scenario, f.seed, v.event, v.at_s, v.conflict, f.reproduce
        ));
    }
    if s.violations.is_empty() {
        out.push_str("\nevery invariant holds");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_seeds_has_both_its_ends_and_goes_forwards() {
        assert_eq!(seeds("3..9").unwrap(), (3, 9));
        assert_eq!(seeds("7").unwrap(), (7, 7));
        for bad in ["9..3", "a..b", "1..", "-1..3", ""] {
            let e = seeds(bad).unwrap_err();
            assert!(e.to_string().contains("--seeds") && e.to_string().contains(bad), "{e}");
        }
    }
}
