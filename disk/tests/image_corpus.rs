//! The fuzzer's corpus of images and requests, replayed by an ordinary compiler; and some more inputs, made from a
//! seed.

#[path = "../../fuzz/src/foreign.rs"]
#[allow(clippy::cast_possible_truncation, reason = "as loose as the fuzz crate, whose file it is")]
mod foreign;
#[path = "../../fuzz/src/guest.rs"]
mod guest;
#[path = "../../fuzz/src/qcow2.rs"]
#[allow(clippy::cast_possible_truncation, reason = "as loose as the fuzz crate, whose file it is")]
mod qcow2;
#[path = "../../fuzz/src/qcow2_input.rs"]
#[allow(clippy::cast_possible_truncation, reason = "as loose as the fuzz crate, whose file it is")]
mod qcow2_input;
#[path = "../../fuzz/src/storage.rs"]
#[allow(clippy::cast_possible_truncation, reason = "as loose as the fuzz crate, whose file it is")]
mod storage;
#[path = "../../fuzz/src/vhd.rs"]
#[allow(clippy::cast_possible_truncation, reason = "as loose as the fuzz crate, whose file it is")]
mod vhd;

use std::path::Path;

use disk::FileOffset;
use fastrand::Rng;
use qcow2_input::Input;

const SEED: u64 = 0x5eed;

/// The inputs of a target, by name.
fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let paths = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path());
    let mut inputs: Vec<_> = paths
        .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(&path).unwrap()))
        .collect();
    inputs.sort();
    assert!(inputs.len() >= 12, "only {} inputs in {}", inputs.len(), directory.display());
    inputs
}

#[test]
fn the_corpus_of_vhds_breaks_no_invariant() {
    for (name, bytes) in corpus("vhd_image") {
        println!("replaying {name}");
        vhd::image(&bytes);
    }
}

#[test]
fn the_corpus_of_qcow2_images_breaks_no_invariant() {
    for (name, bytes) in corpus("qcow2_image") {
        println!("replaying {name}");
        qcow2::image(&bytes);
    }
}

#[test]
fn the_corpus_of_images_of_other_hypervisors_breaks_no_invariant() {
    for (name, bytes) in corpus("foreign_image") {
        println!("replaying {name}");
        foreign::image(&bytes);
    }
}

/// Scope: 300 inputs of up to 100 bytes.
#[test]
fn images_of_other_hypervisors_made_from_a_seed_break_no_invariant() {
    let mut random = Rng::with_seed(SEED);
    println!("seed {SEED:#x}");
    let mut draw = || random.u8(..);
    for _ in 0..300 {
        let len = usize::from(draw()) % 100;
        let input: Vec<u8> = (0..len).map(|_| draw()).collect();
        foreign::image(&input);
    }
}

/// Scope: 1,000 inputs of up to 200 bytes; two thirds of them leave the metadata as it is.
#[test]
fn vhds_made_from_a_seed_break_no_invariant() {
    let mut random = Rng::with_seed(SEED);
    println!("seed {SEED:#x}");
    let mut draw = || random.u8(..);
    for _ in 0..1000 {
        let len = usize::from(draw()) % 200;
        let mut input: Vec<u8> = (0..len).map(|_| draw()).collect();
        if draw() % 3 > 0 && len > 1 {
            input[1] = 0;
        }
        vhd::image(&input);
    }
}

/// Scope: each input of the corpus, changed in 20 ways.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn qcow2_images_changed_by_a_seed_break_no_invariant() {
    for (name, bytes) in corpus("qcow2_image") {
        for seed in 0..20 {
            println!("{name}, seed {seed}");
            let mut input = Input::decode(&bytes);
            input.mutate(qcow2_input::draws(seed));
            qcow2::image(&input.encode());
        }
    }
}

#[test]
fn an_input_of_a_file_says_what_the_file_is() {
    let mut file = vec![0; 5 * 512];
    file[512] = 1;
    file[4 * 512 + 511] = 2;
    let input = Input::of(&file, vec![[1, 2, 3, 4, 5]]);
    let mut read = vec![0xff; file.len()];
    input.file().read(FileOffset(0), &mut read);
    assert_eq!(read, file);
    assert_eq!(
        input.pieces.iter().map(|(number, piece)| (*number, piece.len())).collect::<Vec<_>>(),
        [(1, 1), (4, 512)]
    );
    assert_eq!(Input::decode(&input.encode()), input);
}
