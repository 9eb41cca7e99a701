//! What the tests of the engines share: every engine on every storage, and operations to put through them.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::path::{Path, PathBuf};
use std::process::Command;

use disk::{Action, FileDone, FileError, FileId, FileOp, Io, OpId, Until};
use memory::{Buffer, Segments};
use tempfile::TempDir;
use uring::{Cache, Engine, EngineKind, ImageFile, OpenOptions};

/// tmpfs, and the file system of the build directory.
pub const STORAGES: [&str; 2] = ["/dev/shm", env!("CARGO_TARGET_TMPDIR")];

pub const DIRECT: OpenOptions = OpenOptions { write: true, cache: Cache::None, lock: true };
pub const BUFFERED: OpenOptions = OpenOptions { cache: Cache::Writeback, ..DIRECT };
pub const READ_ONLY: OpenOptions = OpenOptions { write: false, ..DIRECT };

/// Every way to do I/O that there is.
pub const ENGINES: [(EngineKind, OpenOptions); 3] =
    [(EngineKind::Uring, DIRECT), (EngineKind::Uring, BUFFERED), (EngineKind::Aio, DIRECT)];

/// An engine on one file, in a directory of its own.
pub struct Bed {
    pub engine: Engine,
    pub path: PathBuf,
    _directory: TempDir,
}

impl Bed {
    pub fn on(storage: &str, (kind, options): (EngineKind, OpenOptions), content: &[u8], depth: usize) -> Bed {
        let directory = TempDir::new_in(storage).unwrap();
        let path = directory.path().join("image");
        std::fs::write(&path, content).unwrap();
        let file = ImageFile::open(&path, options).unwrap();
        let engine = Engine::open(kind, vec![file], depth).unwrap();
        Bed { engine, path, _directory: directory }
    }

    /// Puts `actions` through the engine, as many at once as it takes; their results, in the same order.
    pub fn run(&mut self, actions: Vec<Action>) -> Vec<Result<(), FileError>> {
        run(&mut self.engine, actions)
    }

    pub fn content(&self) -> Vec<u8> {
        std::fs::read(&self.path).unwrap()
    }
}

pub fn run(engine: &mut Engine, actions: Vec<Action>) -> Vec<Result<(), FileError>> {
    let mut done: Vec<FileDone> = Vec::new();
    let wanted = actions.len();
    for (id, action) in (0..).zip(actions) {
        let mut op = FileOp { id: OpId(id), file: FileId(0), action };
        while let Err(back) = engine.push(op) {
            op = back;
            engine.reap(Until::Any, &mut done).unwrap();
        }
    }
    while done.len() < wanted {
        engine.reap(Until::Any, &mut done).unwrap();
    }
    done.sort_by_key(|done| done.op.id);
    done.into_iter().map(|done| done.result).collect()
}

/// Runs `test` with every engine on every storage.
pub fn everywhere(content: &[u8], depth: usize, test: impl Fn(&mut Bed)) {
    for storage in STORAGES {
        for engine in ENGINES {
            eprintln!("{:?} with {:?} on {storage}", engine.0, engine.1.cache);
            test(&mut Bed::on(storage, engine, content, depth));
        }
    }
}

/// Bytes of which no two blocks are alike.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    };
    (0..len).map(next).collect()
}

/// `len` zero bytes in parts of `part` bytes, `offset` bytes from a page's start on.
pub fn scattered(len: usize, part: usize, offset: usize) -> Segments {
    let buffer = Buffer::zeroed(len + offset);
    let base = buffer.base().wrapping_add(offset);
    let parts = (0..len).step_by(part).map(|at| (base.wrapping_add(at), part.min(len - at)));
    // SAFETY: every part lies in the buffer, which the list owns.
    unsafe { Segments::new(buffer.clone(), parts) }
}

pub fn filled(memory: Segments, bytes: &[u8]) -> Segments {
    memory.copy_from(bytes);
    memory
}

pub fn image(directory: &Path, content: &[u8]) -> PathBuf {
    let path = directory.join("image");
    std::fs::write(&path, content).unwrap();
    path
}

/// A file system of our own, where the machine lets us mount one.
pub struct Mount(TempDir);

impl Mount {
    pub fn new(kind: &str, options: &str) -> Option<Mount> {
        let directory = TempDir::new().unwrap();
        let output = Command::new("mount").args(["-t", kind, "-o", options, kind]).arg(directory.path()).output();
        match output {
            Ok(output) if output.status.success() => Some(Mount(directory)),
            other => {
                eprintln!("not tested: this machine refuses to mount {kind}: {other:?}");
                None
            }
        }
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        assert!(Command::new("umount").arg(self.path()).status().unwrap().success());
    }
}
