//! Power losses under a disk on qcow2: a quick look; the crash explorer of `sim` looks longer.
//!
//! Invariants checked: after a power loss at any operation, with any part of what was not synced in the file, our check
//! finds nothing worse than space lost, the image opens for writing, and every sector holds what it had at the last
//! flush or was given since.

#![allow(clippy::cast_possible_truncation, reason = "sizes of tests fit")]

#[path = "qcow2/rig.rs"]
#[allow(dead_code, reason = "shared with the test under a disk")]
mod rig;

use disk::qcow2::{Qcow2, Spec, check, create};
use disk::{Access, Image, Link, Severity, Tail};
use fastrand::Rng;
use rig::{Rig, file_of, open};

const MIB: u64 = 1 << 20;
const LEN: u64 = 6 * MIB + 1536;

/// What each sector may hold.
struct Allowed(Vec<Vec<u8>>);

impl Allowed {
    fn add(&mut self, at: u64, len: u64, byte: u8) {
        for sector in &mut self.0[(at / 512) as usize..((at + len) / 512) as usize] {
            sector.push(byte);
        }
    }

    /// All that was written is durable.
    fn settle(&mut self) {
        self.0.iter_mut().for_each(|sector| *sector = vec![sector[sector.len() - 1]]);
    }
}

struct Setting {
    parent: bool,
    tail: Tail,
    base: Vec<u8>,
}

fn layers(image: Image, setting: &Setting) -> (Vec<Image>, Vec<Vec<u8>>) {
    if setting.parent {
        (vec![image, Image::Raw(disk::raw::Raw::new(LEN, 512, true).unwrap())], vec![setting.base.clone()])
    } else {
        (vec![image], Vec::new())
    }
}

/// Opens what is left and compares it.
fn inspect(file: Vec<u8>, setting: &Setting, allowed: &Allowed, what: &str) {
    let report = check(&mut file.as_slice()).unwrap();
    assert!(report.worst() != Some(Severity::Damage), "{what}: {report:?}");
    let image = Qcow2::open(&mut file.as_slice(), Access::ReadWrite, setting.tail)
        .unwrap_or_else(|error| panic!("{what}: {error}"));
    let (layers, mut files) = layers(Image::Qcow2(Box::new(image)), setting);
    files.insert(0, file);
    let mut rig = Rig::new(layers, files, Vec::new(), 1);
    let found = rig.read_all();
    for (number, sector) in found.chunks(512).enumerate() {
        assert!(sector.iter().all(|byte| *byte == sector[0]), "{what}: sector {number} is torn");
        assert!(
            allowed.0[number].contains(&sector[0]),
            "{what}: sector {number} holds {} and may hold {:?}",
            sector[0],
            allowed.0[number]
        );
    }
}

/// Begins something, which the sectors may then hold.
fn act(rig: &mut Rig, allowed: &mut Allowed, part: u64, byte: u8) {
    let slot = LEN / 4 / 512 * 512;
    let unit = [512, 4096, 65536][rig.files.random.usize(..3)];
    let size = ((1 + rig.files.random.u64(..4)) * unit).min(slot);
    let at = part * slot + rig.files.random.u64(..(slot - size) / 512 + 1) * 512;
    if rig.files.random.u64(..3) > 0 {
        allowed.add(at, size, byte);
        return rig.write(at, size, byte);
    }
    let (at, end) = (at / 65536 * 65536, (at + size).next_multiple_of(65536).min(LEN));
    allowed.add(at, end - at, 0);
    rig.zero(at, end - at);
}

fn explore(seed: u64, setting: &Setting) {
    println!("seed {seed}");
    let parent = Link {
        format: Some("raw"),
        uuid: [9; 16],
        relative: "base".to_owned(),
        absolute: String::new(),
        len: Some(LEN),
        modified: None,
    };
    let parent = setting.parent.then_some(parent);
    let compression = Default::default();
    let spec = Spec { len: LEN, cluster_size: 64 << 10, uuid: [7; 16], parent, compression };
    let mut file = file_of(&create(&spec).unwrap());
    if setting.tail == Tail::Stale {
        file.resize(16 * MIB as usize, 0xee);
    }
    let image = open(&mut file, setting.tail);
    let mut allowed = Allowed(setting.base.chunks(512).map(|sector| vec![sector[0]]).collect());
    let (layers, mut files) = layers(image, setting);
    files.insert(0, file);
    let mut rig = Rig::new(layers, files, setting.base.clone(), seed);
    let mut losses = Rng::with_seed(seed ^ 0x5eed);
    for step in 0..14u8 {
        for part in 0..4 {
            act(&mut rig, &mut allowed, part, step * 4 + part as u8 + 100);
        }
        if losses.bool() {
            rig.flush();
        }
        while rig.is_busy() {
            rig.step();
            if losses.u8(..3) == 0 {
                let left = rig.files.past().after_power_loss(&mut losses);
                inspect(left, setting, &allowed, &format!("seed {seed}, step {step}"));
            }
        }
        if losses.u8(..3) == 0 {
            rig.flush();
            while rig.is_busy() {
                rig.step();
                let left = rig.files.past().after_power_loss(&mut losses);
                inspect(left, setting, &allowed, &format!("seed {seed}, flush {step}"));
            }
            assert!(rig.finish());
            allowed.settle();
        }
    }
}

#[test]
fn an_image_survives_power_losses() {
    let setting = Setting { parent: false, tail: Tail::Zeroes, base: vec![0; LEN as usize] };
    (0..10).for_each(|seed| explore(seed, &setting));
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn an_image_on_stale_storage_survives_power_losses() {
    let setting = Setting { parent: false, tail: Tail::Stale, base: vec![0; LEN as usize] };
    (0..10).for_each(|seed| explore(seed, &setting));
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_child_survives_power_losses() {
    let base = (0..LEN).map(|at| (at / 512 % 89) as u8 + 1).collect();
    let setting = Setting { parent: true, tail: Tail::Zeroes, base };
    (0..10).for_each(|seed| explore(seed, &setting));
}
