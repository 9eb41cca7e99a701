//! The messages between the daemon and a disk process about an upgrade (docs/control.md, `upgrade`); pure apart from
//! sending the request.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use api::{Code, Problem};
use control::answer::Layer;
use control::ask::Upgrade;
use control::{ImageName, Request};
use uuid::Uuid;

use crate::disk::control::{PendingVerb, Refused, problem};
use crate::disk::process::{DiskProcess, Ended};

/// Time limit for a handover. Requests in flight may wait for storage; a disk that cannot hand over gives up much
/// sooner.
const TO_HAND_OVER: Duration = Duration::from_secs(60);

/// Time limit for a disk to accept a request.
const TO_ASK: Duration = Duration::from_secs(10);

/// Why a disk was not handed over.
#[derive(Debug)]
pub enum NotDone {
    /// The old process continues as before.
    Refused(Problem),
    /// It has not reported a result and may have handed over the disk.
    Unknown(Problem),
}

/// The process that serves after an upgrade, and its result: how long the guest's requests waited in microseconds, if
/// known, and a note, if any.
pub type Outcome = (Option<DiskProcess>, Result<(Option<u64>, Option<String>), Problem>);

/// The layers of a disk as its process names them, from the top down, from its response to `layers`.
pub fn names(layers: &[Layer]) -> Result<Vec<ImageName>, Problem> {
    match layers.iter().map(Layer::name).collect::<Option<Vec<_>>>() {
        Some(names) if !names.is_empty() => Ok(names),
        _ => Err(Problem::failed("list the layers of a disk", "one has no file, or there is none")),
    }
}

/// Requests the disk at a control socket to hand over to the process at the other end of `successor`, with `pause_max`
/// as the limit on how long requests may wait.
pub async fn ask(socket: &Path, successor: OwnedFd, pause_max: Duration) -> Result<PendingVerb<Upgrade>, Problem> {
    let pause_max = Some(u64::try_from(pause_max.as_micros()).unwrap_or(u64::MAX));
    let request = Request::of(Upgrade { program: None, successor: true, pause_max });
    let asked = tokio::time::timeout(TO_ASK, PendingVerb::with_descriptors(socket, request, vec![successor]));
    asked.await.unwrap_or_else(|_| {
        let what = format!("the disk at {} does not accept requests", socket.display());
        Err(Problem::new(Code::Timeout, what).advise("check its log and its storage"))
    })
}

/// Waits until the disk is handed over to the process `to`; returns how long the guest's requests waited, in
/// microseconds.
pub async fn answer(asked: PendingVerb<Upgrade>, to: u32, patience: Duration) -> Result<u64, NotDone> {
    let patience = patience.min(TO_HAND_OVER);
    let answered = tokio::time::timeout(patience, asked.answer(|_| ())).await;
    let answered = answered.unwrap_or_else(|_| {
        let what = format!("the disk was not handed over in {} s", patience.as_secs());
        Err(Problem::new(Code::Timeout, what).advise("check its log and its storage").into())
    });
    match answered {
        Ok(said) if said.pid == to => Ok(said.pause_us),
        Ok(said) => {
            let what = format!("the disk was handed over to process {} instead of {to}", said.pid);
            Err(NotDone::Unknown(Problem::new(Code::Failed, what)))
        }
        Err(Refused::Disk(error)) => Err(NotDone::Refused(problem(error))),
        Err(Refused::Unanswered(problem)) => Err(NotDone::Unknown(problem)),
    }
}

/// Why the old process continues. If the new process is the cause, it may have printed more about it.
pub fn cause(vbd: Uuid, why: Problem, ended: Option<Ended>, said: Option<Problem>) -> Problem {
    let (more, advice) = match (said.filter(|_| why.code == Code::Failed), ended) {
        (Some(said), _) => (format!("; the new process said: {said}"), said.advice.or(why.advice)),
        (None, Some(Ended::Badly(how))) if why.code == Code::Failed => {
            (format!("; the new process exited ({how})"), why.advice)
        }
        (None, _) => (String::new(), why.advice),
    };
    let what = format!("VBD {vbd} was not upgraded, its old process continues: {}{more}", why.detail);
    Problem { advice, ..Problem::new(why.code, what) }
}

#[cfg(test)]
mod test {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;

    use serde_json::json;

    use super::*;

    #[test]
    fn layers_keep_the_names_used_by_the_disk() {
        let layer = |format: &str, path: Option<&str>| {
            let layer = json!({ "layer": 0, "format": format, "path": path, "size": 1, "writable": false });
            serde_json::from_value::<Layer>(layer).unwrap()
        };
        let said = [layer("qcow2", Some("/a b")), layer("raw", Some("/c"))];
        assert_eq!(names(&said).unwrap(), ["qcow2:/a b".parse().unwrap(), "raw:/c".parse().unwrap()]);
        for senseless in [&[] as &[Layer], &[layer("raw", None)]] {
            assert!(names(senseless).is_err());
        }
    }

    #[test]
    fn a_failed_upgrade_reports_the_new_processs_own_error() {
        let of = |code, ended, said| {
            let reported = cause(Uuid::nil(), Problem::new(code, "it has gone").advise("see its log"), ended, said);
            let (_, why) = reported.detail.split_once(" was not upgraded, its old process continues: ").unwrap();
            (why.to_owned(), reported.advice.unwrap())
        };
        let (advice, failed) = ("see its log".to_owned(), || Some(Ended::Badly("exit status: 3".into())));
        assert_eq!(of(Code::Failed, None, None), ("it has gone".into(), advice.clone()));
        assert_eq!(of(Code::Failed, Some(Ended::Well), None), ("it has gone".into(), advice.clone()));
        let with_status = "it has gone; the new process exited (exit status: 3)".to_owned();
        assert_eq!(of(Code::Failed, failed(), None), (with_status, advice.clone()));
        let said = || Problem::new(Code::Failed, "it cannot be confined");
        let with_words = "it has gone; the new process said: it cannot be confined".to_owned();
        assert_eq!(of(Code::Failed, failed(), Some(said())), (with_words.clone(), advice.clone()));
        assert_eq!(of(Code::Failed, failed(), Some(said().advise("confine it"))), (with_words, "confine it".into()));
        // It only received the request to exit.
        assert_eq!(of(Code::Busy, failed(), Some(said())), ("it has gone".into(), advice));
    }

    /// The result of a disk's response.
    async fn answered(says: &'static str) -> Result<u64, NotDone> {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("control.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let disk = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            BufReader::new(&stream).read_line(&mut String::new()).unwrap();
            (&stream).write_all(says.as_bytes()).unwrap();
        });
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let asked = ask(&path, ours.into(), Duration::from_millis(50)).await.unwrap();
        let answer = answer(asked, 5, Duration::from_secs(20)).await;
        disk.join().unwrap();
        answer
    }

    #[tokio::test]
    async fn only_a_refusal_by_the_disk_means_that_it_continues() {
        assert_eq!(answered("{\"id\":1,\"ok\":{\"pid\":5,\"pause_us\":8123}}\n").await.unwrap(), 8123);
        let refused = answered("{\"id\":1,\"error\":{\"kind\":\"failed\",\"message\":\"it has ended\"}}\n").await;
        assert!(matches!(refused, Err(NotDone::Refused(problem)) if problem.detail == "it has ended"));
        let of_xen = answered("{\"id\":1,\"error\":{\"kind\":\"unsupported\",\"message\":\"no\"}}\n").await;
        assert!(matches!(of_xen, Err(NotDone::Refused(problem)) if problem.code == Code::Unsupported));
        for unknown in ["", "{\"id\":1,\"ok\":{\"pid\":6,\"pause_us\":1}}\n", "{\"id\":1,\"ok\":{}}\n"] {
            assert!(matches!(answered(unknown).await, Err(NotDone::Unknown(_))), "{unknown}");
        }
    }
}
