//! Full storage is reported as `NoSpace`, and the engine keeps working.

mod fixture;

use disk::{Action, FileError, FileOffset};
use fixture::{ENGINES, Mount};
use memory::Segments;
use uring::{Engine, ImageFile};

const MIB: u64 = 1 << 20;

#[test]
fn a_write_to_a_full_file_system_fails_with_no_space() {
    for (kind, options) in ENGINES {
        let Some(mount) = Mount::new("tmpfs", "size=1m") else { return };
        let path = fixture::image(mount.path(), &[9; 4096]);
        let mut engine = Engine::open(kind, vec![ImageFile::open(&path, options).unwrap()], 4).unwrap();
        let memory = Segments::zeroed(4096);
        let write = |at, len| Action::Write { at, from: Segments::zeroed(len) };
        let results =
            fixture::run(&mut engine, vec![write(FileOffset(4096), 4 << 20), write(FileOffset(64 * MIB), 2 << 20)]);
        assert_eq!(results, [Err(FileError::NoSpace); 2]);
        let results = fixture::run(&mut engine, vec![Action::Read { at: FileOffset(0), into: memory.clone() }]);
        assert_eq!((results, memory.to_vec()), (vec![Ok(())], vec![9; 4096]));
        drop(engine);
    }
}
