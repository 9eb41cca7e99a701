//! If the system forbids an engine, the error names the other one, and there is no silent fallback.

mod fixture;

use disk::{Action, FileOffset};
use fixture::{DIRECT, Fixture, STORAGES, image, pattern};
use memory::Segments;
use uring::{Engine, EngineError, EngineKind, ImageFile, OpenOptions};

/// Makes a system call fail with `errno` on this thread from now on, as a container's seccomp policy does.
fn forbid(call: libc::c_long, errno: i32) {
    let step = |code: u32, k: u32, jt, jf| libc::sock_filter { code: u16::try_from(code).unwrap(), jt, jf, k };
    let call = u32::try_from(call).unwrap();
    let mut filter = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0), // seccomp_data.nr
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, call, 0, 1),
        step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | errno.unsigned_abs(), 0, 0),
        step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let program = libc::sock_fprog { len: 4, filter: filter.as_mut_ptr() };
    // SAFETY: the kernel copies the program, whose length is four instructions, during the call.
    let result = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
    };
    assert_eq!(result, 0, "cannot install the seccomp filter: {}", std::io::Error::last_os_error());
}

fn open_where_forbidden(kind: EngineKind, call: libc::c_long, errno: i32) -> EngineError {
    let thread = std::thread::spawn(move || {
        let directory = tempfile::tempdir_in(STORAGES[0]).unwrap();
        let file = ImageFile::open(&image(directory.path(), &[]), DIRECT).unwrap();
        forbid(call, errno);
        Engine::open(kind, vec![file], 4).err().unwrap()
    });
    thread.join().unwrap()
}

#[test]
fn the_error_for_a_forbidden_io_uring_names_aio() {
    for errno in [libc::EPERM, libc::ENOSYS] {
        let refused = open_where_forbidden(EngineKind::Uring, libc::SYS_io_uring_setup, errno);
        assert!(matches!(refused, EngineError::UringForbidden { .. }));
        assert_eq!(refused.other(), Some(EngineKind::Aio), "{refused}");
    }
}

#[test]
fn the_error_for_a_kernel_without_aio_names_io_uring() {
    let refused = open_where_forbidden(EngineKind::Aio, libc::SYS_io_setup, libc::ENOSYS);
    assert!(matches!(refused, EngineError::AioMissing { .. }));
    assert_eq!(refused.other(), Some(EngineKind::Uring), "{refused}");
}

#[test]
fn an_exhausted_aio_limit_is_named_in_the_error() {
    let refused = open_where_forbidden(EngineKind::Aio, libc::SYS_io_setup, libc::EAGAIN);
    assert!(matches!(refused, EngineError::AioExhausted { wanted: 5, .. }));
    assert!(refused.to_string().contains("fs.aio-max-nr"), "{refused}");
}

/// Runs all kinds of operations that need threads, after forbidding the system calls for them on an open engine.
fn work_where_forbidden(options: OpenOptions, calls: &'static [libc::c_long]) {
    let thread = std::thread::spawn(move || {
        for storage in STORAGES {
            let mut fixture = Fixture::on(storage, (EngineKind::Uring, options), &[], 16);
            calls.iter().for_each(|&call| forbid(call, libc::EPERM));
            let bytes = pattern(64 << 10, 8);
            let write = |block: u64| Action::Write { at: FileOffset(block << 16), from: Segments::copy_of(&bytes) };
            let last = || [Action::Deallocate { at: FileOffset(0), len: 64 << 10 }, Action::SyncData];
            assert_eq!(fixture.run((0..48).map(write).chain(last()).collect()), [Ok(()); 50]);
            let memory = Segments::zeroed(64 << 10);
            assert_eq!(fixture.run(vec![Action::Read { at: FileOffset(1 << 16), into: memory.clone() }]), [Ok(())]);
            assert!(memory.to_vec() == bytes);
        }
    });
    thread.join().unwrap();
}

#[test]
fn io_uring_works_where_no_thread_can_be_started() {
    for options in [DIRECT, fixture::BUFFERED] {
        work_where_forbidden(options, &[libc::SYS_clone, libc::SYS_clone3]);
    }
}

#[test]
fn io_uring_works_where_aio_is_forbidden() {
    for call in [&[libc::SYS_io_setup], &[libc::SYS_io_submit]] {
        work_where_forbidden(DIRECT, call);
    }
}
