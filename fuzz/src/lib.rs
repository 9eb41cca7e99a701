//! The bodies of the fuzz targets, as plain functions: a fuzzer calls them, and so do tests that replay a corpus.

#![forbid(unsafe_code)]

pub mod foreign;
pub mod guest;
pub mod nbd;
pub mod qcow2;
pub mod qcow2_input;
pub mod storage;
pub mod vhd;
