//! The fuzzer's corpus of VHD images and requests, replayed by an ordinary compiler; and some more inputs, made from a
//! seed.

#[path = "../../fuzz/src/vhd.rs"]
#[allow(clippy::cast_possible_truncation, reason = "as loose as the fuzz crate, whose file it is")]
mod fuzz;

use std::path::Path;

#[test]
fn the_corpus_breaks_no_invariant() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/vhd_image");
    let mut count = 0;
    for entry in std::fs::read_dir(&corpus).unwrap() {
        let path = entry.unwrap().path();
        println!("replaying {}", path.display());
        fuzz::image(&std::fs::read(&path).unwrap());
        count += 1;
    }
    assert!(count >= 12, "only {count} inputs in {}", corpus.display());
}

/// Scope: 1,000 inputs of up to 200 bytes; two thirds of them leave the metadata as it is.
#[test]
fn inputs_made_from_a_seed_break_no_invariant() {
    let mut state = 0x5eed_u64;
    println!("seed {state:#x}");
    let mut draw = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        state.to_be_bytes()[1]
    };
    for _ in 0..1000 {
        let len = usize::from(draw()) % 200;
        let mut input: Vec<u8> = (0..len).map(|_| draw()).collect();
        if draw() % 3 > 0 && len > 1 {
            input[1] = 0;
        }
        fuzz::image(&input);
    }
}
