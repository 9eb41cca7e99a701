//! `disk`: sends a request to a served disk through its control socket and shows the response.
//!
//! It opens no image. Paths are made absolute before they are sent, because the disk's process has a different working
//! directory.

mod human;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::cli::{Disk, DiskVerb, SnapshotMethod};
use crate::failure::{Exit, Failure};
use crate::image_name::{FormatName, ImageName};
use crate::output;

/// Runs the command.
pub fn run(disk: &Disk) -> Result<Exit, Failure> {
    let request = request(&disk.verb)?;
    let mut lines = send(disk, &request)?;
    let mut progress = None;
    loop {
        let (text, line) = hear(disk, &mut lines)?;
        if disk.json {
            output::print(&text)?;
        }
        if let Some(event) = line.get("event") {
            if !disk.json {
                human::show_progress(&mut progress, event);
            }
            continue;
        }
        if let Some(progress) = progress.take() {
            human::end_progress(progress);
        }
        return match (line.get("ok"), line.get("error")) {
            (Some(_), _) if disk.json => Ok(Exit::Done),
            (Some(answer), _) => output::print(&human::answer(&disk.verb, answer)).map(|()| Exit::Done),
            (None, Some(error)) if disk.json => Ok(exit_of(error)),
            (None, Some(error)) => Err(refused(error)),
            (None, None) => Err(misunderstood(disk, &text)),
        };
    }
}

/// The layers of the disk with this control socket, from the leaf down. `patience` limits the wait for the response.
pub fn layers(socket: &Path, patience: Duration) -> Result<Vec<ImageName>, Failure> {
    let disk = Disk { socket: socket.to_owned(), verb: DiskVerb::Layers, json: false };
    let mut lines = send(&disk, &request(&disk.verb)?)?;
    let waited = lines.get_ref().set_read_timeout(Some(patience));
    waited.map_err(|error| Failure::new(format!("send a request to the disk at {}", socket.display()), error))?;
    let (text, line) = hear(&disk, &mut lines)?;
    let layers = line.pointer("/ok/layers").and_then(Value::as_array);
    let names: Option<Vec<ImageName>> = layers.and_then(|layers| layers.iter().map(name_of).collect());
    names.filter(|names| !names.is_empty()).ok_or_else(|| misunderstood(&disk, &text))
}

/// The image name of a layer in a response.
fn name_of(layer: &Value) -> Option<ImageName> {
    let word = |key: &str| layer.get(key).and_then(Value::as_str);
    let path = |key: &str| word(key).map(PathBuf::from);
    Some(ImageName { format: FormatName::of(word("format")?)?, path: path("path")?, data_file: path("data_file") })
}

/// The request as the disk takes it.
fn request(verb: &DiskVerb) -> Result<Map<String, Value>, Failure> {
    let fields = match verb {
        DiskVerb::Snapshot { to, method } => {
            json!({ "verb": "snapshot", "to": whole(to)?, "method": method_word(*method) })
        }
        DiskVerb::Merge { from, into, rate, detach, delete, expect } => {
            let mut merge = json!({ "verb": "merge", "from": from, "into": into, "follow": !detach, "delete": delete });
            if let Some(rate) = rate {
                merge["rate"] = rate.0.into();
            }
            if !expect.is_empty() {
                merge["expect"] = expect.iter().map(whole).collect::<Result<Value, Failure>>()?;
            }
            merge
        }
        DiskVerb::MergeStatus => json!({ "verb": "merge-status" }),
        DiskVerb::MergePause => json!({ "verb": "merge-pause" }),
        DiskVerb::MergeResume => json!({ "verb": "merge-resume" }),
        DiskVerb::MergeCancel => json!({ "verb": "merge-cancel" }),
        DiskVerb::Revert { to, leaf } => json!({ "verb": "revert", "to": to, "leaf": whole(leaf)? }),
        DiskVerb::Clone { of, to } => json!({ "verb": "clone", "of": of, "to": whole(to)? }),
        DiskVerb::Resize { size } => json!({ "verb": "resize", "size": size.0 }),
        DiskVerb::Upgrade { program, pause_max } => {
            let program = program.as_deref().map_or_else(std::env::current_exe, std::path::absolute);
            let program = program.map_err(|error| Failure::new("find the program to start", error))?;
            json!({ "verb": "upgrade", "program": program, "pause_max": pause_max.saturating_mul(1000) })
        }
        DiskVerb::Space => json!({ "verb": "space" }),
        DiskVerb::Pause => json!({ "verb": "pause" }),
        DiskVerb::Resume => json!({ "verb": "resume" }),
        DiskVerb::Layers => json!({ "verb": "layers" }),
        DiskVerb::Stats => json!({ "verb": "stats" }),
        DiskVerb::Version => json!({ "verb": "version" }),
    };
    let mut request = Map::from_iter([("version".to_owned(), Value::from(1)), ("id".to_owned(), Value::from(1))]);
    if let Value::Object(fields) = fields {
        request.extend(fields);
    }
    Ok(request)
}

fn method_word(method: SnapshotMethod) -> &'static str {
    match method {
        SnapshotMethod::Auto => "auto",
        SnapshotMethod::Reflink => "reflink",
        SnapshotMethod::Chain => "chain",
    }
}

fn whole(name: &ImageName) -> Result<String, Failure> {
    let whole = name.map_paths(|path| std::path::absolute(path));
    let whole = whole.map_err(|error| Failure::new(format!("resolve the path of {name}"), error))?;
    let refused = |_| Failure::new(format!("request {name}"), "its path is not UTF-8, so it cannot be sent as JSON");
    whole.word().into_string().map_err(refused)
}

fn send(disk: &Disk, request: &Map<String, Value>) -> Result<BufReader<UnixStream>, Failure> {
    let failed = |error: std::io::Error| {
        let advice = match error.kind() {
            std::io::ErrorKind::NotFound => "give the socket created by `serve --control SOCKET`",
            std::io::ErrorKind::ConnectionRefused => "the disk is no longer served there",
            std::io::ErrorKind::PermissionDenied => "only the user that serves the disk may control it",
            _ => "check that the disk is still served",
        };
        Failure::new(format!("send a request to the disk at {}", disk.socket.display()), error).advise(advice)
    };
    let mut stream = UnixStream::connect(&disk.socket).map_err(failed)?;
    let text = format!("{}\n", Value::Object(request.clone()));
    stream.write_all(text.as_bytes()).map_err(failed)?;
    Ok(BufReader::new(stream))
}

fn hear(disk: &Disk, lines: &mut BufReader<UnixStream>) -> Result<(String, Value), Failure> {
    let tried = || format!("read from the disk at {}", disk.socket.display());
    let mut text = String::new();
    match lines.read_line(&mut text) {
        Ok(0) => Err(Failure::new(tried(), "it exited without answering").advise("see its log for the reason")),
        Ok(_) => match serde_json::from_str(&text) {
            Ok(line) => Ok((text, line)),
            Err(_) => Err(misunderstood(disk, &text)),
        },
        Err(error) => Err(Failure::new(tried(), error)),
    }
}

fn misunderstood(disk: &Disk, text: &str) -> Failure {
    let said: String = output::printable(text.trim_end()).chars().take(200).collect();
    Failure::new(format!("parse the response from {}", disk.socket.display()), said)
        .advise("check that this is a disk's control socket")
}

/// The disk's refusal: its message says what was tried, and why it failed.
fn refused(error: &Value) -> Failure {
    let text = |field: &str| error.get(field).and_then(Value::as_str).map(output::printable);
    let failure = Failure::told(text("message").unwrap_or_else(|| "the disk refused the request".into()));
    let failure = failure.exit_as(exit_of(error));
    match text("advice") {
        Some(advice) => failure.advise(advice),
        None => failure,
    }
}

fn exit_of(error: &Value) -> Exit {
    match error.get("kind").and_then(Value::as_str) {
        Some("invalid" | "malformed" | "unknown-verb" | "version") => Exit::Usage,
        _ => Exit::Failed,
    }
}
