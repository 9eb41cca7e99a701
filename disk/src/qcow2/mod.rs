//! qcow2.

pub mod unpack;
