//! A limit on the size of files (EFBIG) counts as no space. Alone in its program: the limit is the process's.

mod bed;

use bed::{Bed, ENGINES, STORAGES};
use disk::{Action, FileError};
use memory::Segments;
use rustix::process::{Resource, Rlimit, setrlimit};

#[test]
fn a_write_beyond_the_limit_fails_with_no_space_and_one_across_it_too() {
    // SAFETY: ignoring a signal runs no handler.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    setrlimit(Resource::Fsize, Rlimit { current: Some(1 << 20), maximum: Some(1 << 20) }).unwrap();
    for storage in STORAGES {
        for engine in ENGINES {
            let mut bed = Bed::on(storage, engine, &[], 4);
            let write = |at| Action::Write { at, from: Segments::zeroed(64 << 10) };
            let results = bed.run(vec![write(0), write(1 << 20), write((1 << 20) - (32 << 10))]);
            assert_eq!(results, [Ok(()), Err(FileError::NoSpace), Err(FileError::NoSpace)]);
        }
    }
}
