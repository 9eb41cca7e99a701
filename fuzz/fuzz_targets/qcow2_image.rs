//! Fuzz target: any file as a qcow2 image, and requests to it.
#![no_main]

use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};
use tapline_fuzz::qcow2_input::{Input, draws};

fuzz_target!(|input: &[u8]| tapline_fuzz::qcow2::image(input));

// Half of the time it is what the input means that is changed, and not its bytes.
fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    if seed % 2 == 0 {
        return fuzzer_mutate(data, size, max_size);
    }
    let mut input = Input::decode(&data[..size]);
    input.mutate(draws(seed.into()));
    let mut bytes = input.encode();
    bytes.truncate(max_size);
    data[..bytes.len()].copy_from_slice(&bytes);
    bytes.len()
});
