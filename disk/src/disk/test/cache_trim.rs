//! What a disk that is not used forgets, and what it must not.

use super::*;

const PLACES: u64 = 300;

/// Where the `number`th write goes: each in another chunk.
fn place(number: u64) -> u64 {
    number * 2 * MIB + number % 7 * 4096
}

fn qcow2() -> Rig {
    let (image, bytes) = qcow2_on_raw(1024 * MIB);
    let base = Image::Raw(Raw::new(1024 * MIB, 512, true).unwrap());
    Rig::new(vec![image, base], vec![bytes, Vec::new()], 1)
}

/// Reads what was written, and how many pieces of metadata had to be loaded for that.
fn loads(rig: &mut Rig) -> usize {
    rig.files.log.clear();
    (0..PLACES).for_each(|number| assert_eq!(rig.read(place(number), 4096), bytes(number)));
    rig.files.log.len() - PLACES as usize
}

fn bytes(number: u64) -> Vec<u8> {
    vec![(number % 251) as u8 + 1; 4096]
}

/// Writes all over a disk and forgets what can be: before the round, in the midst of one and after it.
fn forgets_and_finds(mut rig: Rig) {
    for number in 0..PLACES {
        assert_eq!(rig.write(place(number), &bytes(number)), Status::Done);
        if number % 3 == 0 {
            rig.disk.drop_caches();
        }
    }
    rig.submit(Operation::Flush, 0, 0, Segments::empty(), 1);
    while !rig.disk.is_idle() {
        rig.disk.drop_caches();
        rig.step();
    }
    assert_eq!(rig.answered.pop_back().map(|(_, status, _)| status), Some(Status::Done));
    loads(&mut rig);
    assert_eq!(loads(&mut rig), 0, "all is known by now");
    assert!(rig.disk.map.known_mut().bytes() > 4096);
    rig.disk.drop_caches();
    assert!(rig.disk.map.known_mut().bytes() < 1024, "{} bytes", rig.disk.map.known_mut().bytes());
    assert!(loads(&mut rig) > 0, "nothing is known");
}

#[test]
fn what_a_qcow2_disk_has_forgotten_it_finds_again() {
    forgets_and_finds(qcow2());
}

#[test]
fn what_a_vhd_disk_has_forgotten_it_finds_again() {
    forgets_and_finds(child(1024 * MIB, 0, 0));
}

#[test]
fn much_was_taken_when_much_was_learned_or_written_since_it_was_given_back() {
    let mut rig = qcow2();
    rig.disk.options.trim_bytes = 8 << 10;
    assert_eq!(rig.write(place(0), &[1; 4096]), Status::Done);
    assert!(!rig.disk.is_trim_due());
    (1..PLACES).for_each(|number| assert_eq!(rig.write(place(number), &[1; 4096]), Status::Done));
    assert!(rig.disk.is_trim_due());
    rig.disk.drop_caches();
    rig.read(place(7), 4096);
    assert!(!rig.disk.is_trim_due(), "what was loaded since is little");
    for number in 0..40 {
        assert_eq!(rig.write(2 * MIB * PLACES + number * (64 << 10), &[1; 4096]), Status::Done);
        assert_eq!(rig.flush(), Status::Done);
    }
    assert!(rig.disk.is_trim_due(), "rounds take memory too");
}
