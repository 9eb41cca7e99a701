//! Freed memory is returned to the kernel. Alone in its process, since other tests would allocate memory meanwhile.

#![cfg(all(target_os = "linux", target_env = "gnu"))]

use memory::give_back_freed;

fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn memory_freed_between_allocations_in_use_is_returned_to_the_kernel() {
    const MANY: usize = 64 << 10;
    let before = resident();
    // Each is too small to have pages of its own; one per page is kept.
    let pieces: Vec<Box<[u8]>> = (0..MANY).map(|_| vec![1; 1024].into_boxed_slice()).collect();
    let full = resident();
    let kept: Vec<Box<[u8]>> = (0..).zip(pieces).filter(|(at, _)| at % 64 == 0).map(|(_, piece)| piece).collect();
    give_back_freed();
    let after = resident();
    assert!(full - before > 60 << 20, "{before} {full}");
    assert!(after < before + (24 << 20), "{before} {after}");
    drop(kept);
}
