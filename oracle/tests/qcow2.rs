//! qcow2 images in turn under a disk of ours and under `imago`, an implementation by others.
//!
//! Invariants checked: each reads what the other has written, and qemu-img finds nothing wrong after either.

#![allow(clippy::cast_possible_truncation, reason = "sizes of tests fit")]

#[path = "../../disk/tests/qcow2/rig.rs"]
#[allow(dead_code, reason = "shared with the test of power losses")]
mod rig;
#[path = "../../disk/tests/qcow2/room.rs"]
#[allow(dead_code, reason = "shared with the test of checks")]
mod room;

use disk::Tail;
use disk::qcow2::{Spec, create};
use imago::file::File;
use imago::qcow2::Qcow2;
use imago::{FormatAccess, FormatDriverBuilder, PermissiveImplicitOpenGate};
use rig::{Rig, file_of, open};
use room::{Class, Room};

const LEN: u64 = 20 << 20;

/// The image under imago, for writing.
fn under_imago(room: &Room) -> FormatAccess<File> {
    let image = Qcow2::<File>::builder_path(room.path("image")).write(true);
    FormatAccess::new(image.open(PermissiveImplicitOpenGate::default()).unwrap())
}

fn assert_sound(room: &Room) {
    assert_eq!(room.qemu_class("image"), Class::Clean, "{}", room.qemu_text("image"));
}

#[test]
fn each_reads_what_the_other_has_written() {
    for (seed, cluster_size) in [(1, 64 << 10), (2, 256 << 10), (3, 2 << 20)] {
        println!("seed {seed}");
        let room = Room::new();
        let spec = Spec { len: LEN, cluster_size, uuid: [7; 16], parent: None, compression: Default::default() };
        let mut file = file_of(&create(&spec).unwrap());
        let mut model = vec![0; LEN as usize];
        for turn in 0..4u8 {
            let image = open(&mut file, Tail::Zeroes);
            let mut rig = Rig::new(vec![image], vec![file], model, seed + u64::from(turn) * 16);
            rig.verify();
            for step in 0..20u8 {
                let size = (1 + rig.files.random.u64(..200)) * 4096;
                let at = rig.files.random.u64(..(LEN - size) / 4096) * 4096;
                if step % 4 == 3 {
                    rig.zero(at, size)
                } else {
                    rig.write(at, size, turn * 20 + step + 1)
                }
                assert!(rig.finish());
            }
            rig.flush();
            assert!(rig.finish());
            room.write("image", &rig.files.bytes[0]);
            assert_sound(&room);

            model = rig.model;
            let imago = under_imago(&room);
            let mut found = vec![0; LEN as usize];
            imago.read(&mut found, 0).unwrap();
            assert!(found == model, "imago reads something else");
            for step in 0..20u8 {
                let size = (1 + rig.files.random.u64(..200)) * 4096;
                let at = rig.files.random.u64(..(LEN - size) / 4096) * 4096;
                let place = &mut model[at as usize..(at + size) as usize];
                if step % 4 == 3 {
                    place.fill(0);
                    imago.write_zeroes(at, size).unwrap();
                } else {
                    place.fill(turn * 20 + step + 101);
                    imago.write(&*place, at).unwrap();
                }
            }
            imago.flush().unwrap();
            drop(imago);
            assert_sound(&room);
            file = room.read("image");
        }
    }
}
