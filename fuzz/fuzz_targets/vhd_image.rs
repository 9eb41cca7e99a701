//! Fuzz target: a VHD whose metadata was changed, and requests to it.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| tapline_fuzz::vhd::image(input));
