//! All tests of the disk process in one program: with one program per file, each would be linked with all dependencies,
//! which takes minutes and gigabytes.

#![allow(missing_docs, reason = "nobody imports a test")]

mod bytes;
mod changed_blocks;
mod confined;
mod control;
mod control_vhost;
mod data_file;
mod depths;
mod device;
mod dirty_bitmaps;
mod failed_sync;
mod fatal;
mod fileless;
mod full;
mod full_device;
mod full_killed;
mod full_qemu;
mod handed;
mod held;
mod http;
mod image;
mod image_compressed;
mod image_foreign;
mod image_jobs;
mod image_qcow2;
mod image_replay;
mod image_stream;
mod image_vhd;
mod killed;
mod large_sectors;
mod limits;
mod log;
mod page;
mod page_accuracy;
mod probes;
mod qemu_locks;
mod refused_engine;
mod remote;
mod remote_away;
mod remote_parent;
mod remote_tls;
mod rest;
mod serve;
mod shape;
mod shares;
mod takeover;
mod threads;
mod tls;
mod tool;
mod upgrade;
mod xen;
