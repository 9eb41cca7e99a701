//! A process killed in the middle of its writes leaves no lock behind after a moment.

mod fixture;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use disk::{Action, FileId, FileOffset, FileOp, Io, OpId, Until};
use fixture::{DIRECT, STORAGES, image};
use memory::Segments;
use uring::{Engine, EngineKind, ImageFile};

const IMAGE: &str = "TAPLINE_TEST_IMAGE";
const KIND: &str = "TAPLINE_TEST_ENGINE";

/// The process to be killed: this program again, with a path to write to until it is killed.
#[test]
fn writer() {
    let Some(path) = std::env::var_os(IMAGE) else { return };
    let kind = if std::env::var(KIND).unwrap() == "aio" { EngineKind::Aio } else { EngineKind::Uring };
    let file = ImageFile::open(Path::new(&path), DIRECT).unwrap();
    let mut engine = Engine::open(kind, vec![file], 32).unwrap();
    let mut done = Vec::new();
    for id in 0.. {
        let action = Action::Write { at: FileOffset(id % 64 * (256 << 10)), from: Segments::zeroed(256 << 10) };
        if engine.push(FileOp { id: OpId(id), file: FileId(0), action }).is_err() {
            engine.reap(Until::Any, &mut done).unwrap();
            println!("writing");
        }
        done.clear();
    }
}

#[test]
fn the_image_of_a_killed_process_can_be_reopened() {
    for kind in ["uring", "aio"] {
        let directory = tempfile::tempdir_in(STORAGES[1]).unwrap();
        let path = image(directory.path(), &[]);
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "writer", "--nocapture"])
            .envs([(IMAGE, path.as_os_str()), (KIND, kind.as_ref())])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.map_while(Result::ok).any(|line| line.ends_with("writing")));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(ImageFile::open(&path, DIRECT).is_ok(), "{kind}: a killed process still holds the lock");
    }
}
