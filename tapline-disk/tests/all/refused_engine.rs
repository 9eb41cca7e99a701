//! Which engine a disk uses if the system refuses the most suitable one, as in a container.

use std::path::Path;

use serde_json::json;

use crate::tool::control::Control;
use crate::tool::nbd::Nbd;
use crate::tool::served::Disk;
use crate::tool::{Room, where_refused};

/// One in memory, where Linux AIO suits, and one on a disk, where io_uring does.
fn rooms() -> [Room; 2] {
    [Room::below(Path::new("/dev/shm")), Room::new()]
}

#[test]
fn a_disk_takes_the_engine_that_is_granted_and_says_so() {
    let refused = [
        (libc::SYS_io_uring_setup, libc::EPERM, "aio", "Linux AIO is used"),
        (libc::SYS_io_uring_register, libc::EPERM, "aio", "Linux AIO is used"),
        (libc::SYS_io_uring_register, libc::EINVAL, "aio", "Linux AIO is used"),
        (libc::SYS_io_uring_enter, libc::EPERM, "aio", "Linux AIO is used"),
        (libc::SYS_io_setup, libc::EAGAIN, "uring", "fs.aio-max-nr"),
        (libc::SYS_io_setup, libc::EPERM, "uring", "forbidden here"),
        (libc::SYS_io_submit, libc::EPERM, "uring", "refuses io_submit"),
        (libc::SYS_io_getevents, libc::EPERM, "uring", "refuses io_getevents"),
    ];
    for (call, errno, granted, said) in refused {
        where_refused(call, errno.unsigned_abs(), || {
            for room in rooms() {
                room.done("image create vhd:a.vhd --size 64M");
                let disk = Disk::serve(&room, "vhd:a.vhd --nbd nbd.sock --control control.sock");
                let mut nbd = Nbd::connect(&room.file("nbd.sock")).unwrap();
                nbd.write(1 << 20, &[7; 4096]).unwrap();
                nbd.flush().unwrap();
                assert_eq!(nbd.read(1 << 20, 4096).unwrap(), [7; 4096]);
                let layers = Control::connect(&room.file("control.sock")).done(&json!({"verb": "layers"}));
                assert_eq!(layers["engine"], granted);
                let was_refused = disk.said.contains("although it suits it less");
                assert!(!was_refused || disk.said.contains(said), "{}", disk.said);
                assert_eq!(disk.stop().0, Some(0));
            }
        });
    }
}

#[test]
fn an_engine_that_was_asked_for_is_not_replaced() {
    let refused = [
        (libc::SYS_io_uring_setup, libc::EPERM, "uring", "use --io-engine aio"),
        (libc::SYS_io_setup, libc::EAGAIN, "aio", "sysctl -w fs.aio-max-nr=NUMBER, or use --io-engine uring"),
    ];
    for (call, errno, asked, advice) in refused {
        where_refused(call, errno.unsigned_abs(), || {
            let room = Room::new();
            room.done("image create raw:a.raw --size 1M");
            let said = room.tapline(&format!("serve raw:a.raw --nbd nbd.sock --io-engine {asked}"));
            assert_ne!(said.code, Some(0), "{said:?}");
            assert!(said.err.contains(advice), "{said:?}");
        });
    }
}

/// Linux AIO blocks on files in the page cache: there is no substitute for io_uring.
#[test]
fn files_in_the_page_cache_need_io_uring() {
    where_refused(libc::SYS_io_uring_setup, libc::EPERM.unsigned_abs(), || {
        let room = Room::new();
        room.write("a.raw", &[0; 1 << 20]);
        let said = room.tapline("serve raw:a.raw --nbd nbd.sock --cache writeback");
        assert_ne!(said.code, Some(0), "{said:?}");
        assert!(said.err.contains("forbidden here") && said.err.contains("use --cache none"), "{said:?}");
    });
}

#[test]
fn where_both_engines_are_refused_both_reasons_are_told() {
    where_refused(libc::SYS_io_uring_setup, libc::EPERM.unsigned_abs(), || {
        where_refused(libc::SYS_io_setup, libc::EAGAIN.unsigned_abs(), || {
            for room in rooms() {
                room.done("image create raw:a.raw --size 1M");
                let said = room.tapline("serve raw:a.raw --nbd nbd.sock");
                assert_ne!(said.code, Some(0), "{said:?}");
                for reason in ["is forbidden here", "fs.aio-max-nr"] {
                    assert!(said.err.contains(reason), "{said:?}");
                }
            }
        });
    });
}
