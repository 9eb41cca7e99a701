//! Replays the committed corpus of the blkif fuzz target, and random inputs with a known seed.

#[path = "../fuzz_bodies/blkif_ring.rs"]
mod blkif_ring;

use std::path::Path;

use fastrand::Rng;

#[test]
fn the_corpus_violates_no_invariant() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/blkif_ring");
    let mut inputs: Vec<_> = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    inputs.sort();
    assert!(!inputs.is_empty(), "{} is empty", directory.display());
    for input in inputs {
        println!("{}", input.display());
        blkif_ring::run(&std::fs::read(&input).unwrap());
    }
}

#[test]
fn four_hundred_random_front_ends_violate_no_invariant() {
    for seed in 1..=400u64 {
        println!("seed {seed}");
        let mut input = [0; 600];
        Rng::with_seed(seed).fill(&mut input);
        blkif_ring::run(&input);
    }
}
