//! Verbs of a plugged VDI, which its disk process carries out while the guest goes on (docs/control.md).

use std::time::Duration;

use api::{Code, Problem};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::daemon::Daemon;
use crate::disk::control::{self, Beside};
use crate::disk::place::Place;

/// How long a verb may take that holds requests for a moment.
const TO_CHANGE: Duration = Duration::from_secs(120);

/// How long a merge may take: a disk that moves nothing for so long never will.
const TO_MERGE: Duration = Duration::from_secs(7 * 24 * 3600);

/// How long a disk may take to say what it is.
const TO_SAY: Duration = Duration::from_secs(10);

/// Has the disk process of a VBD do a verb.
pub async fn ask(daemon: &Daemon, vbd: Uuid, verb: Value, files: Vec<Beside>) -> Result<Value, Problem> {
    let files = daemon.tool.redo.with_logs(files)?;
    control::ask(&socket(daemon, vbd), verb, files, TO_CHANGE, |_| ()).await
}

/// The same for one that takes long and tells how far it is.
pub async fn follow(
    daemon: &Daemon,
    vbd: Uuid,
    verb: Value,
    files: Vec<Beside>,
    told: impl FnMut(&Value) + Send,
) -> Result<Value, Problem> {
    let files = daemon.tool.redo.with_logs(files)?;
    control::ask(&socket(daemon, vbd), verb, files, TO_MERGE, told).await
}

/// The path of the leaf that the disk process of a VBD writes to; none if the process is no more.
pub async fn leaf(daemon: &Daemon, vbd: Uuid) -> Result<Option<String>, Problem> {
    match control::ask(&socket(daemon, vbd), json!({ "verb": "layers" }), Vec::new(), TO_SAY, |_| ()).await {
        Ok(said) => Ok(said.pointer("/layers/0/path").and_then(Value::as_str).map(str::to_owned)),
        // Nobody listens any more, or it has ended meanwhile. One that is only slow may still be writing.
        Err(problem) if problem.code == Code::Failed => Ok(None),
        Err(problem) => Err(problem),
    }
}

fn socket(daemon: &Daemon, vbd: Uuid) -> std::path::PathBuf {
    Place::of(&daemon.config, vbd).control()
}
