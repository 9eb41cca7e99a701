//! The bodies of the fuzz targets, as plain functions: a fuzzer calls them, and so do tests that replay a corpus.

#![forbid(unsafe_code)]

pub mod nbd;
pub mod vhd;
