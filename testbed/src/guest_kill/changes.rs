//! What goes on below the guest meanwhile: a snapshot, a merge, a snapshot, a merge, without end, whoever serves the
//! disk.
//!
//! It is a thread that speaks to the control socket (docs/control.md). What was under way when a process died is asked
//! for again, by the chain that it was meant of. Keeps: a request that is refused ends it with the refusal, and so the
//! test.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use fastrand::Rng;
use serde_json::{Value, json};

use super::chain;

/// Layers of which there are at most: a merge may be of the leaf, below it, or of all.
const LAYERS_MAX: usize = 3;

/// Bytes a second that a merge copies at most, one time in two: so many MiB at least, and most.
const RATE_MIB: (u64, u64) = (1, 16);

/// In one of two pauses a leaf gathers more before it is merged.
const GATHERING_MAX_MS: u64 = 400;

/// How long it is waited for a process that is not there.
const AGAIN: Duration = Duration::from_millis(5);

/// What is under way, and what was done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Done {
    pub under_way: Option<Verb>,
    pub snapshots: u64,
    pub merges: u64,
    /// Of these, which were asked for again after a death.
    pub again: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    Snapshot,
    Merge,
}

/// The thread.
pub struct Changes {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Result<(), String>>>,
}

#[derive(Default)]
struct Shared {
    over: AtomicBool,
    done: Mutex<Done>,
}

impl Shared {
    fn note(&self, note: impl FnOnce(&mut Done)) {
        note(&mut self.done.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Changes {
    /// Begins, with images in `work`, and requests to whoever listens at `control`.
    pub fn begin(work: &Path, control: &Path, seed: u64) -> Self {
        let shared = Arc::new(Shared::default());
        let changer = Changer {
            work: work.to_owned(),
            control: control.to_owned(),
            random: Rng::with_seed(seed),
            shared: Arc::clone(&shared),
            snapshots: 0,
            merge: None,
        };
        Self { shared, thread: Some(thread::spawn(move || changer.run())) }
    }

    /// What is under way now, and what was done.
    pub fn done(&self) -> Done {
        *self.shared.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why it has ended by itself, if it has.
    pub fn failure(&mut self) -> Option<String> {
        let ended = self.thread.take_if(|thread| thread.is_finished())?;
        Some(ended.join().map_or_else(|_| "it panicked".to_owned(), |ended| ended.err().unwrap_or_default()))
    }

    /// There is nobody any more who could be asked.
    pub fn end(&mut self) -> Result<(), String> {
        self.shared.over.store(true, Ordering::Relaxed);
        self.thread.take().map_or(Ok(()), |thread| thread.join().unwrap_or_else(|_| Err("it panicked".to_owned())))
    }
}

impl Drop for Changes {
    fn drop(&mut self) {
        // Whoever has a failure of his own to tell does not ask for this one.
        self.end().unwrap_or_default();
    }
}

struct Changer {
    work: PathBuf,
    control: PathBuf,
    random: Rng,
    shared: Arc<Shared>,
    snapshots: u64,
    /// A merge that was asked for and not answered.
    merge: Option<Value>,
}

/// What an answer may be.
enum Answer {
    Ok(Value),
    Refused(String),
    /// Who was asked is dead, or another process is about to take its place.
    Gone,
}

impl Changer {
    fn run(mut self) -> Result<(), String> {
        while !self.shared.over.load(Ordering::Relaxed) {
            match UnixStream::connect(&self.control) {
                Ok(stream) => self.speak(&mut BufReader::new(stream))?,
                Err(_) => thread::sleep(AGAIN),
            }
        }
        Ok(())
    }

    /// Asks one process for one thing after the other, until it is gone.
    fn speak(&mut self, lines: &mut BufReader<UnixStream>) -> Result<(), String> {
        if let Some(merge) = self.merge.clone() {
            if !self.perform(lines, Verb::Merge, &merge)? {
                return Ok(());
            }
            self.shared.note(|done| done.again += 1);
            self.merge = None;
        }
        while !self.shared.over.load(Ordering::Relaxed) {
            let layers = match ask(lines, &json!({ "verb": "layers" })) {
                Answer::Ok(answer) => names(&answer),
                Answer::Refused(why) => return Err(format!("layers: {why}")),
                Answer::Gone => return Ok(()),
            };
            let snapshot = layers.len() == 1 || layers.len() < LAYERS_MAX && self.random.u64(..2) == 0;
            if snapshot {
                self.snapshots += 1;
                let to = self.work.join(chain::snapshot(self.snapshots));
                let request = json!({ "verb": "snapshot", "to": format!("qcow2:{}", to.display()) });
                if !self.perform(lines, Verb::Snapshot, &request)? {
                    return Ok(());
                }
                continue;
            }
            if self.random.u64(..2) == 0 {
                thread::sleep(Duration::from_millis(self.random.u64(..GATHERING_MAX_MS)));
            }
            let request = self.choose(&layers);
            self.merge = Some(request.clone());
            if !self.perform(lines, Verb::Merge, &request)? {
                return Ok(());
            }
            self.merge = None;
        }
        Ok(())
    }

    /// A merge of some of these layers.
    fn choose(&mut self, layers: &[String]) -> Value {
        let into = 1 + self.random.usize(..layers.len() - 1);
        let from = self.random.usize(..into);
        let mut request = json!({
            "verb": "merge", "from": from, "into": into, "follow": true, "delete": true, "expect": layers,
        });
        if self.random.u64(..2) == 0 {
            let (least, most) = RATE_MIB;
            request["rate"] = ((least + self.random.u64(..most)) << 20).into();
        }
        request
    }

    /// Whether it was done; not, if the process is gone.
    fn perform(&mut self, lines: &mut BufReader<UnixStream>, verb: Verb, request: &Value) -> Result<bool, String> {
        self.shared.note(|done| done.under_way = Some(verb));
        let answer = ask(lines, request);
        self.shared.note(|done| done.under_way = None);
        match answer {
            Answer::Ok(_) => {
                self.shared.note(|done| match verb {
                    Verb::Snapshot => done.snapshots += 1,
                    Verb::Merge => done.merges += 1,
                });
                Ok(true)
            }
            Answer::Gone => Ok(false),
            Answer::Refused(why) => Err(format!("{request} was refused: {why}")),
        }
    }
}

/// The names in an answer to `layers`, from the leaf down.
fn names(answer: &Value) -> Vec<String> {
    let layers = answer["layers"].as_array().map(Vec::as_slice).unwrap_or_default();
    let word = |layer: &Value, key: &str| layer[key].as_str().unwrap_or_default().to_owned();
    layers.iter().map(|layer| format!("{}:{}", word(layer, "format"), word(layer, "path"))).collect()
}

/// Sends a request and waits for what it leads to.
fn ask(lines: &mut BufReader<UnixStream>, request: &Value) -> Answer {
    let mut request = request.clone();
    request["version"] = 1.into();
    request["id"] = 1.into();
    if lines.get_mut().write_all(format!("{request}\n").as_bytes()).is_err() {
        return Answer::Gone;
    }
    loop {
        let mut text = String::new();
        // A line without an end is the last word of a process that was killed.
        let Ok(1..) = lines.read_line(&mut text) else { return Answer::Gone };
        let Ok(mut line) = serde_json::from_str::<Value>(&text) else { return Answer::Gone };
        if line.get("ok").is_some() {
            return Answer::Ok(line["ok"].take());
        }
        if let Some(error) = line.get("error") {
            let kind = error["kind"].as_str();
            if kind == Some("replaced") || kind == Some("busy") && error["message"] == "an upgrade is in progress" {
                thread::sleep(AGAIN);
                return Answer::Gone;
            }
            return Answer::Refused(error.to_string());
        }
    }
}
