//! Image files on this host: chains opened and verified, images created, checked and repaired, redo logs replayed.

pub mod chain;
pub mod check;
pub mod create;
pub mod damage;
pub mod engine_choice;
pub mod expected_maps;
pub mod fileless;
pub mod libvhd;
pub mod map_of_daemon;
pub mod mtime;
pub mod parent_link;
pub mod plan_layers;
pub mod presence;
pub mod progress;
pub mod raw_lookalike;
pub mod redo_log;
pub mod reflink;
pub mod remote;
pub mod remote_layer;
pub mod replay_redo;
pub mod rewrite_marker;
pub mod stale_layers;
pub mod tracking;
pub mod uuid;
pub mod vhd_tail;
pub mod write_synced;
