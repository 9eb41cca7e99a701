//! All tests of the daemon in one program: with one program per file, each would be linked with all dependencies, which
//! takes minutes and gigabytes.

#![allow(missing_docs, reason = "nobody imports a test")]

mod autostart;
mod backups;
mod bridges;
mod calibrate;
mod cbt;
mod confine;
mod confine_vm;
mod daemon;
mod damage;
mod dashboard;
mod dashboard_views;
mod hangs;
mod harness;
mod history;
mod hosts;
mod http;
mod incremental;
mod inventory;
mod journal;
mod late;
mod limits;
mod lists;
mod names;
mod nbd_address;
mod nbd_changes;
mod panics;
mod plug;
mod program;
mod python;
mod reconcile;
mod recover;
mod remote;
mod retention;
mod retention_vm;
mod retries;
mod roles;
mod same_file;
mod scan;
mod screen;
mod sectors;
mod seeds;
mod shares;
mod sr;
mod statistics;
mod suspend;
mod tags;
mod upgrade;
mod upgrade_guest;
mod upload;
mod vdi;
mod vm;
mod vm_snapshot;
mod watchdog;
