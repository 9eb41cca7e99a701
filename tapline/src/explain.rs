//! `explain`: whether a disk is healthy, and what bounds it now.
//!
//! The health is what the daemon knows and what can be seen here, where the process is stopped or does not respond as
//! well: then nothing waits for it. What bounds a healthy disk follows from two readings of its statistics page and of
//! the CPU time of its process.

mod bound;
mod transfers;

use std::borrow::Cow;
use std::time::Duration;

use api::{Health, HealthState, Vbd, VbdState};
use control::{Error, Kind, ask};
use jiff::Timestamp;
use serde_json::json;
use stats::{Delays, Snapshot};

use crate::disk::{ask_within, away_in_words};
use crate::failure::Failure;
use crate::health;
use crate::output::print_local;
use crate::place::{self, Named, Place};
use crate::session::How;
use crate::wrap::{width, wrapped};
use bound::Interval;

/// How long a process may take to respond before it counts as stuck.
const TO_ANSWER: Duration = Duration::from_secs(1);

/// `explain`.
#[derive(Debug, clap::Args)]
pub struct Explain {
    /// A control socket (`serve --control`), or a VBD of the daemon on this host: UUID prefix, VM/vda, or the disk's
    /// name
    #[arg(value_name = "DISK")]
    disk: String,
    /// Sampling time in seconds; a disk that is stuck is not sampled
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: u32,
}

/// A sentence, and what it follows from.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Finding {
    /// A word for programs.
    bound: &'static str,
    text: String,
    /// What could be done.
    advice: Option<Cow<'static, str>>,
}

/// What is known of a disk.
struct Explained {
    health: Health,
    findings: Vec<Finding>,
}

/// Runs the command.
pub fn run(explain: &Explain, how: How) -> Result<(), Failure> {
    let json = how.json;
    let time = Duration::from_secs(explain.seconds.into());
    let explained = match place::named(&explain.disk, how)? {
        Named::Socket(control) => examined(&place::of_socket(&control)?, None, time)?,
        Named::Vbd(vbd) => match place::of_vbd(&vbd) {
            Some(place) => examined(&place, Some(&vbd), time)?,
            None => not_served(&vbd),
        },
    };
    Ok(print_local(&if json { explained.json() } else { explained.text(Timestamp::now(), width()) })?)
}

/// A VBD that has no process.
fn not_served(vbd: &Vbd) -> Explained {
    let idle = vbd.state == VbdState::Unplugged && vbd.health.is_healthy();
    let findings = idle.then(|| Finding {
        bound: "unplugged",
        text: "It is not plugged: no process serves it.".to_owned(),
        advice: Some(format!("plug it: tapline vbd plug {}", vbd.uuid).into()),
    });
    Explained { health: vbd.health.clone(), findings: findings.into_iter().collect() }
}

/// Looks at a disk that is served, for some time if it is not stuck.
fn examined(place: &Place, vbd: Option<&Vbd>, time: Duration) -> Result<Explained, Error> {
    let failed = |why| place.unreadable(why);
    let reader = match place.open() {
        Err(why) if vbd.is_some_and(|vbd| !vbd.health.is_healthy()) => {
            let health = vbd.map(|vbd| vbd.health.clone()).unwrap_or_default();
            let text = format!("{}.", place.unreadable(why).with_advice());
            return Ok(Explained { health, findings: vec![Finding { bound: "unknown", text, advice: None }] });
        }
        opened => opened.map_err(failed)?,
    };
    let mut delays = Delays::default();
    let before = reader.snapshot().map_err(failed)?;
    must_be_written(place, &before)?;
    let mut seen = health::seen(&mut delays, &before);
    let (mut full, mut away) = (false, Vec::new());
    if !seen.stopped {
        match ask_within(&place.control, ask::Watch {}, TO_ANSWER) {
            Ok(Some(condition)) => {
                (full, seen.broken) = (condition.full, condition.broken);
                away = if condition.away_ms.is_some() { servers_away(place) } else { Vec::new() };
            }
            Ok(None) => seen.silent = true,
            // Its daemon knows; of another user's disk it cannot be found out.
            Err(_) => {}
        }
    }
    let judged = |seen| match vbd {
        Some(vbd) => health::of_vbd(vbd, seen, full),
        None => health::without_daemon(&place.control.display().to_string(), before.pid, seen, full),
    };
    let health = judged(seen);
    if seen.stopped || seen.silent || health.state == HealthState::Stuck {
        let findings = in_flight(&before).into_iter().chain(away).collect();
        return Ok(Explained { health, findings });
    }
    let cpu_before = before.pid.and_then(bound::cpu_time);
    std::thread::sleep(time);
    let now = reader.snapshot().map_err(failed)?;
    let cpu_now = now.pid.filter(|pid| Some(*pid) == before.pid).and_then(bound::cpu_time);
    let cpu = cpu_before.zip(cpu_now).map(|(before, now)| now.saturating_sub(before));
    let later = health::seen(&mut delays, &now);
    let health = judged(api::health::Seen { silent: seen.silent, broken: seen.broken, ..later });
    let mut findings = away;
    findings.extend(bound::judge(&Interval::between(&before, &now, cpu)));
    // A disk without a control socket cannot be asked.
    let shape = ask_within(&place.control, ask::Shape::default(), TO_ANSWER);
    findings.extend(shape.ok().flatten().map(|shape| transfers::shaped(&shape)));
    Ok(Explained { health, findings })
}

/// Refuses the page of a disk whose process has ended.
fn must_be_written(place: &Place, page: &Snapshot) -> Result<(), Error> {
    if !page.writer_has_ended(&place.page) {
        return Ok(());
    }
    let why = "the process that served it has ended";
    Err(Error::cannot(format!("explain the disk at {}", place.control.display()), why)
        .of_kind(Kind::State)
        .advise("serve it again; tapline doctor lists what such processes have left"))
}

/// The NBD servers of the disk's images that are away.
fn servers_away(place: &Place) -> Vec<Finding> {
    let layers = ask_within(&place.control, ask::Layers {}, TO_ANSWER).ok().flatten();
    let layers = layers.map(|answer| answer.layers).unwrap_or_default();
    let away = layers.iter().filter_map(|layer| {
        let server = layer.server.as_ref()?;
        let words = away_in_words(server.away_ms?, server);
        let at = control::printable(layer.path.as_deref().unwrap_or("?"));
        let text = format!("The NBD server of {at} is {words}.");
        let advice = "start it again with the same disk; requests wait for it as long as --patience says, then fail";
        Some(Finding { bound: "server-away", text, advice: Some(advice.into()) })
    });
    away.collect()
}

/// The requests in flight, if there are any.
fn in_flight(now: &Snapshot) -> Option<Finding> {
    let oldest = now.oldest_of_all()?;
    let text = bound::in_flight(now.in_flight.len() as u64, oldest);
    Some(Finding { bound: "in-flight", text, advice: None })
}

impl Explained {
    fn json(&self) -> String {
        let findings = self.findings.iter();
        let findings: Vec<_> =
            findings.map(|one| json!({ "bound": one.bound, "text": one.text, "advice": one.advice })).collect();
        format!("{}\n", json!({ "health": self.health, "findings": findings }))
    }

    fn text(&self, now: Timestamp, width: usize) -> String {
        let state = health::in_words(&self.health, now);
        let first = match &self.health.reason {
            Some(reason) => format!("The disk is {state}: {reason}."),
            None => format!("The disk is {state}."),
        };
        let mut out = wrapped("", &control::printable(&first), width);
        let advise = |out: &mut String, advice: Option<&str>| {
            out.push_str(&advice.map(|advice| wrapped("  ", &control::printable(advice), width)).unwrap_or_default());
        };
        advise(&mut out, self.health.advice.as_deref());
        for Finding { text, advice, .. } in &self.findings {
            out.push_str(&wrapped("", text, width));
            advise(&mut out, advice.as_deref());
        }
        out
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn sentences_fit_eighty_columns_and_begin_with_the_health() {
        let health = Health {
            state: HealthState::Stuck,
            since: Some("2026-11-28T19:59:00Z".parse().unwrap()),
            reason: Some("process 1234 is stopped by a signal or a debugger (state T)".into()),
            advice: Some("continue it: kill -CONT 1234; to give the disk up: tapline vbd unplug --force 1".into()),
        };
        let finding = Finding { bound: "in-flight", text: "One request is in flight, for 3.0 s.".into(), advice: None };
        let explained = Explained { health, findings: vec![finding] };
        let text = explained.text("2026-11-28T20:00:00Z".parse().unwrap(), 80);
        let expected = "\
The disk is stuck for 1 min, since 2026-11-28T19:59:00Z: process 1234 is stopped
by a signal or a debugger (state T).
  continue it: kill -CONT 1234; to give the disk up: tapline vbd unplug --force
  1
One request is in flight, for 3.0 s.
";
        assert_eq!(text, expected);
        let json: serde_json::Value = serde_json::from_str(&explained.json()).unwrap();
        assert_eq!((&json["health"]["state"], &json["findings"][0]["bound"]), (&json!("stuck"), &json!("in-flight")));
    }

    #[test]
    fn a_vbd_without_a_process_is_explained_by_its_health() {
        let mut vbd = Vbd::unplugged(uuid::Uuid::nil(), api::Transport::Nbd);
        assert_eq!(not_served(&vbd).findings[0].bound, "unplugged");
        vbd.state = VbdState::Restarting;
        vbd.health = Health { state: HealthState::Restarting, ..Health::default() };
        assert!(not_served(&vbd).findings.is_empty());
    }
}
