//! Changes the chain below the guest continuously: alternating snapshots and merges, whichever process serves the disk.
//!
//! A thread that uses the control socket (docs/control.md). A request that was pending when a process died is repeated,
//! with the chain for which it was meant. A refusal ends the thread, and the test.

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

/// Maximum number of layers: a merge may be of the leaf, below it, or of all.
const LAYERS_MAX: usize = 3;

/// Range of the rate limit of one in two merges, in MiB per second.
const RATE_MIB: (u64, u64) = (1, 16);

/// Maximum pause before one in two merges, in which the leaf collects data.
const GATHERING_MAX_MS: u64 = 400;

/// Interval between attempts to connect to a process.
const AGAIN: Duration = Duration::from_millis(5);

/// Counts of changes, and the current one.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChangeCounts {
    pub under_way: Option<ChangeVerb>,
    pub snapshots: u64,
    pub merges: u64,
    /// The number of them that were repeated after a death.
    pub again: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeVerb {
    Snapshot,
    Merge,
}

/// The thread that changes the chain.
pub struct Changes {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Result<(), String>>>,
}

#[derive(Default)]
struct Shared {
    over: AtomicBool,
    done: Mutex<ChangeCounts>,
}

impl Shared {
    fn note(&self, note: impl FnOnce(&mut ChangeCounts)) {
        note(&mut self.done.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Changes {
    /// Starts the thread, with images in `work`, for the processes that listen at `control`.
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

    /// The counts so far, and the current change.
    pub fn done(&self) -> ChangeCounts {
        *self.shared.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The reason why the thread has ended, if it failed.
    pub fn failure(&mut self) -> Option<String> {
        let ended = self.thread.take_if(|thread| thread.is_finished())?;
        Some(ended.join().map_or_else(|_| "it panicked".to_owned(), |ended| ended.err().unwrap_or_default()))
    }

    /// Ends the thread, before the last process is gone.
    pub fn end(&mut self) -> Result<(), String> {
        self.shared.over.store(true, Ordering::Relaxed);
        self.thread.take().map_or(Ok(()), |thread| thread.join().unwrap_or_else(|_| Err("it panicked".to_owned())))
    }
}

impl Drop for Changes {
    fn drop(&mut self) {
        // A caller with a failure of its own does not call `end`, and this one is dropped.
        self.end().unwrap_or_default();
    }
}

struct Changer {
    work: PathBuf,
    control: PathBuf,
    random: Rng,
    shared: Arc<Shared>,
    snapshots: u64,
    /// A merge that was requested and not answered.
    merge: Option<Value>,
}

/// The result of a request.
enum Reply {
    Ok(Value),
    Refused(String),
    /// The process is dead, or is being replaced.
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

    /// Sends requests to one process until it is gone.
    fn speak(&mut self, lines: &mut BufReader<UnixStream>) -> Result<(), String> {
        if let Some(merge) = self.merge.clone() {
            if !self.perform(lines, ChangeVerb::Merge, &merge)? {
                return Ok(());
            }
            self.shared.note(|done| done.again += 1);
            self.merge = None;
        }
        while !self.shared.over.load(Ordering::Relaxed) {
            let layers = match ask(lines, &json!({ "verb": "layers" })) {
                Reply::Ok(answer) => names(&answer),
                Reply::Refused(why) => return Err(format!("layers: {why}")),
                Reply::Gone => return Ok(()),
            };
            let snapshot = layers.len() == 1 || layers.len() < LAYERS_MAX && self.random.u64(..2) == 0;
            if snapshot {
                self.snapshots += 1;
                let to = self.work.join(chain::snapshot(self.snapshots));
                let request = json!({ "verb": "snapshot", "to": format!("qcow2:{}", to.display()) });
                if !self.perform(lines, ChangeVerb::Snapshot, &request)? {
                    return Ok(());
                }
                continue;
            }
            if self.random.u64(..2) == 0 {
                thread::sleep(Duration::from_millis(self.random.u64(..GATHERING_MAX_MS)));
            }
            let request = self.choose(&layers);
            self.merge = Some(request.clone());
            if !self.perform(lines, ChangeVerb::Merge, &request)? {
                return Ok(());
            }
            self.merge = None;
        }
        Ok(())
    }

    /// A random merge of these layers.
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

    /// Returns true if the change was done; false if the process is gone.
    fn perform(
        &mut self,
        lines: &mut BufReader<UnixStream>,
        verb: ChangeVerb,
        request: &Value,
    ) -> Result<bool, String> {
        self.shared.note(|done| done.under_way = Some(verb));
        let answer = ask(lines, request);
        self.shared.note(|done| done.under_way = None);
        match answer {
            Reply::Ok(_) => {
                self.shared.note(|done| match verb {
                    ChangeVerb::Snapshot => done.snapshots += 1,
                    ChangeVerb::Merge => done.merges += 1,
                });
                Ok(true)
            }
            Reply::Gone => Ok(false),
            Reply::Refused(why) => Err(format!("{request} was refused: {why}")),
        }
    }
}

/// The names in a response to `layers`, from the leaf down.
fn names(answer: &Value) -> Vec<String> {
    let layers = answer["layers"].as_array().map(Vec::as_slice).unwrap_or_default();
    let word = |layer: &Value, key: &str| layer[key].as_str().unwrap_or_default().to_owned();
    layers.iter().map(|layer| format!("{}:{}", word(layer, "format"), word(layer, "path"))).collect()
}

/// Sends a request and waits for its final response.
fn ask(lines: &mut BufReader<UnixStream>, request: &Value) -> Reply {
    let mut request = request.clone();
    request["version"] = 1.into();
    request["id"] = 1.into();
    if lines.get_mut().write_all(format!("{request}\n").as_bytes()).is_err() {
        return Reply::Gone;
    }
    loop {
        let mut text = String::new();
        // An incomplete line is the last output of a process that was killed.
        let Ok(1..) = lines.read_line(&mut text) else { return Reply::Gone };
        let Ok(mut line) = serde_json::from_str::<Value>(&text) else { return Reply::Gone };
        if line.get("ok").is_some() {
            return Reply::Ok(line["ok"].take());
        }
        if let Some(error) = line.get("error") {
            let kind = error["kind"].as_str();
            if kind == Some("replaced") || kind == Some("busy") && error["message"] == "an upgrade is in progress" {
                thread::sleep(AGAIN);
                return Reply::Gone;
            }
            return Reply::Refused(error.to_string());
        }
    }
}
