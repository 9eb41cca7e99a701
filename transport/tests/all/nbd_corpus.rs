//! Replays the committed corpus of the NBD fuzz targets, with a normal toolchain.

#[path = "../../../fuzz/src/nbd.rs"]
#[allow(clippy::cast_possible_truncation, reason = "as loose as the fuzz crate, whose file it is")]
mod fuzz;

use std::path::Path;

fn replay(target: &str, body: fn(&[u8])) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let mut count = 0;
    for entry in std::fs::read_dir(&corpus).unwrap() {
        let path = entry.unwrap().path();
        let input = std::fs::read(&path).unwrap();
        println!("replaying {}", path.display());
        body(&input);
        count += 1;
    }
    assert!(count >= 12, "only {count} inputs in {}", corpus.display());
}

#[test]
fn negotiations_of_the_corpus_violate_no_invariant() {
    replay("nbd_negotiation", fuzz::negotiation);
}

#[test]
fn commands_of_the_corpus_violate_no_invariant() {
    replay("nbd_commands", fuzz::commands);
}
