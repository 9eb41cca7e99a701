//! What was freed goes back to the kernel. In a process of its own, since others would take memory meanwhile.

#![cfg(all(target_os = "linux", target_env = "gnu"))]

use memory::give_back_freed;

fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn what_was_freed_between_pieces_in_use_goes_back() {
    const MANY: usize = 64 << 10;
    let before = resident();
    // Each too small to have pages of its own; of each page's worth one stays.
    let pieces: Vec<Box<[u8]>> = (0..MANY).map(|_| vec![1; 1024].into_boxed_slice()).collect();
    let full = resident();
    let kept: Vec<Box<[u8]>> = (0..).zip(pieces).filter(|(at, _)| at % 64 == 0).map(|(_, piece)| piece).collect();
    give_back_freed();
    let after = resident();
    assert!(full - before > 60 << 20, "{before} {full}");
    assert!(after < before + (24 << 20), "{before} {after}");
    drop(kept);
}
