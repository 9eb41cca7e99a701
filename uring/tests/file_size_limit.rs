//! Exceeding the file size limit (EFBIG) is reported as no space. The only test of its program, as the limit applies to
//! the process.

mod fixture;

use disk::{Action, FileError, FileOffset};
use fixture::{ENGINES, Fixture, STORAGES};
use memory::Segments;
use rustix::process::{Resource, Rlimit, setrlimit};

#[test]
fn a_write_beyond_or_across_the_limit_fails_with_no_space() {
    // SAFETY: ignoring a signal runs no handler.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    setrlimit(Resource::Fsize, Rlimit { current: Some(1 << 20), maximum: Some(1 << 20) }).unwrap();
    for storage in STORAGES {
        for engine in ENGINES {
            let mut fixture = Fixture::on(storage, engine, &[], 4);
            let write = |at| Action::Write { at, from: Segments::zeroed(64 << 10) };
            let results = fixture.run(vec![
                write(FileOffset(0)),
                write(FileOffset(1 << 20)),
                write(FileOffset((1 << 20) - (32 << 10))),
            ]);
            assert_eq!(results, [Ok(()), Err(FileError::NoSpace), Err(FileError::NoSpace)]);
        }
    }
}
