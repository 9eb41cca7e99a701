//! The tests of the servers, in one program, as each program is linked with all dependencies. Two have programs of
//! their own: `vhost_corpus`, which counts file descriptors, and `xen_hostile`, which is run in dom0.

#![allow(missing_docs, reason = "a test program has no users")]
#![allow(clippy::cast_possible_truncation, reason = "the tests' own numbers are small")]

#[path = "../blkif_mock/mod.rs"]
mod blkif_mock;
#[path = "../nbd_support/mod.rs"]
mod nbd_support;
#[path = "../vhost_mock/mod.rs"]
mod vhost_mock;

mod blkif_corpus;
mod blkif_handshake;
mod blkif_hostile;
mod blkif_protocol;
mod blkif_takeover;
mod nbd_corpus;
mod nbd_extended;
mod nbd_hostile;
mod nbd_protocol;
mod nbd_tls;
mod nbd_tls_hostile;
mod nbd_tools;
mod vhost_blkio;
mod vhost_inflight;
mod vhost_migration;
mod vhost_protocol;
mod vhost_qemu;
mod vhost_ring;
