//! Tests of `tapline-backup` with real directories, real images and other people's NBD servers.

#![allow(missing_docs, reason = "tests")]

mod changes;
mod damage;
mod killed;
mod mount;
mod room;
mod round_trip;
mod rule;
mod s3;
mod servers;
mod trouble;
