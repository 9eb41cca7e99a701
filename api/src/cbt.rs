//! Changed-block tracking of VDIs.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::BackupId;

/// The recording of the changed blocks of a VDI, and the maps of changed blocks that it has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ChangeTracking {
    /// Whether changes are recorded while it is plugged.
    #[serde(default)]
    pub enabled: bool,
    /// The maps of successive intervals, the oldest first. The last one of a snapshot ended with the snapshot; that of
    /// another VDI is in use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub maps: Vec<ChangeMap>,
    /// Since when changes are recorded in the map in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// Why the map before that one has ended, so that changes since an earlier snapshot are not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
    /// Maps that are not needed any more, whose files are to be removed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unneeded: Vec<Uuid>,
    /// The backup that a snapshot is kept for: the next backup of the disk to that target reads only the changes since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<BackupBase>,
}

/// A backup that has the very content of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BackupBase {
    /// The target that it is on.
    pub target: Uuid,
    /// The backup.
    pub backup: BackupId,
    /// The digest of its content.
    pub content: String,
}

/// A map of changed blocks: a file of the repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ChangeMap {
    /// Its identity. Its file is named after it.
    pub uuid: Uuid,
    /// The map of the interval before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub continues: Option<Uuid>,
}

impl ChangeMap {
    /// The name of its file in the repository.
    pub fn file(&self) -> String {
        map_file(self.uuid)
    }
}

/// The name of the file of a map in its repository.
pub fn map_file(map: Uuid) -> String {
    format!("{map}.changes")
}

impl ChangeTracking {
    /// Ends all maps: changes since any earlier time are not known, for this reason.
    pub fn end(&mut self, why: impl Into<String>) {
        if !self.maps.is_empty() {
            self.ended = Some(why.into());
            self.since = None;
        }
        self.unneeded.extend(self.maps.drain(..).map(|map| map.uuid));
    }

    /// Replaces all maps by one that begins now.
    pub fn begin(&mut self, map: Uuid, now: Timestamp) {
        self.unneeded.extend(self.maps.drain(..).map(|map| map.uuid));
        self.maps = vec![ChangeMap { uuid: map, continues: None }];
        self.since = Some(now);
    }

    /// The interval of the map in use ends, and the one of `map` begins.
    pub fn switch(&mut self, map: Uuid, now: Timestamp) {
        let continues = self.maps.last().map(|last| last.uuid);
        self.maps.push(ChangeMap { uuid: map, continues });
        self.since = Some(now);
    }
}

/// How changed blocks are listed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ChangesFormat {
    /// Ranges of bytes.
    #[default]
    Extents,
    /// A base64 bitmap, as XenAPI's `VDI.list_changed_blocks` has it.
    Xapi,
}

/// The parts of a VDI that may differ from an earlier snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VdiChanges {
    /// The snapshot.
    pub from: Uuid,
    /// The later snapshot, or the VDI as it is now.
    pub to: Uuid,
    /// Bytes of the disk.
    pub size: u64,
    /// Bytes of a block: parts consist of whole blocks, except at the end of the disk.
    pub block: u32,
    /// Bytes that may have changed.
    pub changed: u64,
    /// The parts, in order. Only with the format `extents`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extents: Option<Vec<ChangedExtent>>,
    /// A bit for each block in base64, the first block being the highest bit of the first byte. Only with the format
    /// `xapi`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bitmap: Option<String>,
}

/// A part of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ChangedExtent {
    /// Its first byte.
    pub start: u64,
    /// Its length in bytes.
    pub length: u64,
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_map_that_is_ended_is_unneeded_and_says_why() {
        let (now, maps) = (Timestamp::UNIX_EPOCH, [1, 2].map(Uuid::from_u128));
        let mut tracking = ChangeTracking { enabled: true, ..ChangeTracking::default() };
        tracking.end("nothing to end");
        assert_eq!(tracking.ended, None);
        tracking.begin(maps[0], now);
        tracking.switch(maps[1], now);
        assert_eq!(tracking.maps.last().unwrap().continues, Some(maps[0]));
        tracking.end("it was reverted");
        assert_eq!((tracking.maps.len(), tracking.unneeded.len()), (0, 2));
        assert_eq!((tracking.ended.as_deref(), tracking.since), (Some("it was reverted"), None));
    }
}
