//! Merges of qcow2 images, alone and mixed with VHD, under random requests, against a flat array of bytes.

use super::random::random_batch;
use super::*;
use crate::Link;
use crate::qcow2::{self, Qcow2};

const LEN: u64 = 9 * MIB + 512 * 7;

/// Which format a layer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    Qcow2(u32),
    Vhd,
}

fn new_layer(of: Of, id: u8) -> Vec<u8> {
    let Of::Qcow2(cluster_size) = of else {
        return new_vhd(LEN, if id == 0 { Kind::Dynamic } else { child_of(id - 1) }, 2 << 20, id);
    };
    let link = Link {
        format: None,
        uuid: uuid(id.wrapping_sub(1)),
        relative: "base".into(),
        absolute: "/base".into(),
        len: None,
        modified: None,
    };
    let parent = (id > 0).then_some(link);
    let creation =
        qcow2::create(&qcow2::Spec { len: LEN, cluster_size, uuid: uuid(id), parent, compression: Default::default() })
            .unwrap();
    let mut bytes = vec![0; creation.len as usize];
    apply(&mut bytes, &creation.writes);
    bytes
}

fn open_layer(of: Of, bytes: &[u8]) -> Image {
    match of {
        Of::Vhd => open(bytes, Access::ReadWrite),
        Of::Qcow2(_) => {
            let opened = Qcow2::open(&mut { bytes }, Access::ReadWrite, Tail::Zeroes).unwrap();
            Image::Qcow2(Box::new(opened))
        }
    }
}

fn check(of: Of, file: &[u8]) {
    if of == Of::Vhd {
        assert_eq!(vhd::check(&mut { file }, Tail::Zeroes).unwrap().problems, []);
    } else {
        let report = qcow2::check(&mut { file }).unwrap();
        assert!(report.problems.is_empty(), "{:?}", report.problems);
    }
}

fn run(formats: &[Of], (from, into): (usize, usize), seed: u64) {
    println!("{formats:?}, seed {seed}, {from} into {into}");
    let mut model = vec![0u8; LEN as usize];
    let mut files: Vec<Vec<u8>> = Vec::new();
    for (id, &of) in formats.iter().rev().enumerate() {
        files.insert(0, new_layer(of, id as u8));
        let first = formats.len() - files.len();
        let layers = formats[first..].iter().zip(&files).map(|(&of, bytes)| open_layer(of, bytes)).collect();
        let mut rig = Rig::new(layers, files, seed);
        (0..12).for_each(|_| random_batch(&mut rig, &mut model));
        assert_eq!(rig.flush(), Status::Done);
        assert!(rig.read(0, LEN) == model, "before the merge");
        files = rig.files.bytes;
    }
    let layers = formats.iter().zip(&files).map(|(&of, bytes)| open_layer(of, bytes)).collect();
    let mut rig = Rig::new(layers, files, seed);
    rig.disk.begin_merge(from, into).unwrap();
    while rig.disk.merge().unwrap().state == MergeState::Running {
        random_batch(&mut rig, &mut model);
        rig.disk.step_merge(&mut rig.files);
        random_batch(&mut rig, &mut model);
    }
    assert_eq!(rig.disk.merge().unwrap().state, MergeState::Copied);
    random_batch(&mut rig, &mut model);
    rig.quiesce();
    rig.disk.end_merge().unwrap();
    rig.resume();
    random_batch(&mut rig, &mut model);
    assert!(rig.read(0, LEN) == model, "after the merge");
    assert_eq!(rig.flush(), Status::Done);
    let mut left: Vec<(Of, Vec<u8>)> = formats.iter().copied().zip(rig.files.bytes).collect();
    for (of, source) in left.drain(from..into) {
        let mut source = Rig::new(vec![open_layer(of, &source)], vec![source], seed);
        assert!(source.read(0, LEN).iter().all(|&byte| byte == 0), "a source holds something");
    }
    left.iter().for_each(|(of, file)| check(*of, file));
    let layers = left.iter().map(|(of, bytes)| open_layer(*of, bytes)).collect();
    let mut again = Rig::new(layers, left.into_iter().map(|(_, file)| file).collect(), seed);
    assert!(again.read(0, LEN) == model, "after reopening");
}

/// Scope: chains of two to four, clusters of 64 KiB to 2 MiB, qcow2 over and under VHD; one seed each.
#[test]
fn images_of_any_format_are_merged_into_each_other() {
    let small = Of::Qcow2(64 << 10);
    let large = Of::Qcow2(2 << 20);
    run(&[small, small], (0, 1), 1);
    run(&[small, small, small], (0, 2), 2);
    run(&[small, small, small], (1, 2), 3);
    run(&[large, small], (0, 1), 4);
    run(&[small, large, large], (0, 1), 5);
    run(&[large, large, small, large], (1, 3), 6);
    run(&[Of::Vhd, small], (0, 1), 7);
    run(&[small, Of::Vhd], (0, 1), 8);
    run(&[small, Of::Vhd, large, Of::Vhd], (0, 3), 9);
}
