//! Merges of VHDs into VHDs and into a raw image, under random requests, against a flat array of bytes.

use super::random::random_batch;
use super::*;
use crate::DiskOffset;

const LEN: u64 = 9 * MIB + 512 * 7;

/// A base and layers on it, each written to at random; with what they read as.
fn layered(base: (Image, Vec<u8>), block_size: u32, layers: u8, seed: u64) -> (Vec<Vec<u8>>, Vec<u8>) {
    let mut model = vec![0u8; LEN as usize];
    let mut rig = Rig::new(vec![base.0], vec![base.1], seed);
    for id in 1..=layers {
        for _ in 0..20 {
            random_batch(&mut rig, &mut model);
        }
        rig.quiesce();
        let leaf = new_vhd(LEN, child_of(id - 1), block_size, id);
        rig.disk.push_leaf(FileId(id), open(&leaf, Access::ReadWrite)).unwrap();
        rig.files.bytes.push(leaf);
        rig.resume();
    }
    random_batch(&mut rig, &mut model);
    assert_eq!(rig.flush(), Status::Done);
    rig.files.bytes.reverse();
    (rig.files.bytes, model)
}

/// Merges the layers `from..into` of the files, with requests in between; the files that are left.
fn merge(
    layers: Vec<Image>,
    files: Vec<Vec<u8>>,
    model: &mut [u8],
    (from, into): (usize, usize),
    seed: u64,
) -> Vec<Vec<u8>> {
    let mut rig = Rig::new(layers, files, seed);
    rig.disk.begin_merge(from, into).unwrap();
    while rig.disk.merge().unwrap().state == MergeState::Running {
        random_batch(&mut rig, model);
        rig.disk.step_merge(&mut rig.files);
        random_batch(&mut rig, model);
    }
    assert_eq!(rig.disk.merge().unwrap().state, MergeState::Copied);
    random_batch(&mut rig, model);
    rig.quiesce();
    let sources = rig.disk.end_merge().unwrap();
    for mut source in sources {
        let everything = Span { at: DiskOffset(0), len: LEN };
        assert_eq!(source.format.map(everything), Ok(Mapping::Parent { len: LEN }), "a source holds something");
    }
    rig.resume();
    random_batch(&mut rig, model);
    assert!(rig.read(0, LEN) == model, "after the merge");
    assert_eq!(rig.flush(), Status::Done);
    rig.files.bytes.drain(from..into);
    rig.files.bytes
}

fn vhds(files: &[Vec<u8>]) -> Vec<Image> {
    files.iter().map(|bytes| open(bytes, Access::ReadWrite)).collect()
}

/// Scope: chains of four with blocks of 512 KiB and of 16 MiB, merged in four ways, two seeds each.
#[test]
fn vhds_are_merged_into_a_vhd() {
    for block_size in [512 << 10, 16 << 20] {
        for (seed, from, into) in [(1, 0, 1), (2, 0, 3), (3, 1, 2), (4, 1, 3), (5, 0, 3), (6, 2, 3)] {
            println!("blocks of {block_size}, seed {seed}, {from} into {into}");
            let base = new_vhd(LEN, Kind::Dynamic, block_size, 0);
            let (files, mut model) = layered((open(&base, Access::ReadWrite), base), block_size, 3, seed);
            let left = merge(vhds(&files), files, &mut model, (from, into), seed);
            for file in &left {
                assert_eq!(vhd::check(&mut file.as_slice(), Tail::Zeroes).unwrap().problems, []);
            }
            let mut again = Rig::new(vhds(&left), left, seed);
            assert!(again.read(0, LEN) == model, "after reopening");
        }
    }
}

/// Scope: three seeds.
#[test]
fn vhds_are_merged_into_a_raw_image() {
    for seed in 10..13 {
        let raw = || Image::Raw(Raw::new(LEN, 512, false).unwrap());
        let (files, mut model) = layered((raw(), vec![0; LEN as usize]), 2 << 20, 2, seed);
        let mut layers = vhds(&files[..2]);
        layers.push(raw());
        let left = merge(layers, files, &mut model, (0, 2), seed);
        assert_eq!(left.len(), 1);
        assert!(left[0] == model, "the image itself");
    }
}
