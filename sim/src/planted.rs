//! Bugs of the kinds that formats and disks really had.
//!
//! Production code does not contain them: [`crate::saboteur`] plants them around a format and an engine. An explorer
//! must find each.

use std::fmt;
use std::str::FromStr;

use crate::fault::FaultKind;
use crate::workload::Op::Chain;
use crate::workload::{Durable, Op, Sectors, Step};

/// A bug that can be planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Planted {
    /// The table is written before the bitmaps it refers to.
    TableBeforeBitmap,
    /// Table and bitmaps are written together.
    OneBatch,
    /// A write becomes visible, and part of the next round, when it begins.
    EarlyCommit,
    /// A flush is answered without its last sync.
    EarlyAnswer,
    /// A round begins without syncing the data.
    NoDataSync,
    /// No sync between the bitmaps and the table.
    NoMiddleSync,
    /// The space of a discarded block is reused before the table that freed it is durable.
    EarlyReuse,
    /// Bitmaps are written with whole bytes set: eight sectors where one was written.
    RoundedBitmap,
    /// A bitmap is sealed with the bits of writes still in flight.
    EarlyBits,
    /// The footer is written at its old position, so that the file is not extended for its new block.
    OldFooter,
    /// The footer is written where the next block will begin.
    FooterOverBlock,
    /// A new header is written over the old one, to which the footer still points.
    HeaderInPlace,
    /// A footer is written before the header to which it points.
    FooterBeforeHeader,
    /// Two blocks that are allocated concurrently get the same space.
    SamePlace,
    /// A failed write is treated as successful.
    LostAbandon,
    /// Metadata whose write failed is not written again.
    LostRewrite,
    /// A discard in a differencing image clears bits, which shows the parent again.
    ParentShown,
    /// Space after the end of the file is assumed to be zero on storage where it is not.
    TrustedTail,
    /// Space is treated as clean although it could not be deallocated.
    TrustedRelease,
    /// A block is placed in space that a killed process has freed, before that is durable.
    UnprovenPlace,
    /// A device is treated as larger than it is.
    DeviceEndForgotten,
    /// A cluster's refcount is written after the entry that refers to it.
    RefcountAfterEntry,
    /// Refcounts and the entries that refer to the clusters are written together.
    RefcountWithEntry,
    /// A cluster becomes visible, and part of the next round, before its data is written.
    EntryBeforeData,
    /// A round has only its last sync.
    EntryWithoutSync,
    /// A freed cluster is reused before the entry that freed it is durable.
    ReuseBeforeFlush,
    /// The header is written before the tables that it points to.
    TornHeader,
    /// Copy-on-write omits the bytes around the write.
    FillForgotten,
    /// A second write to a cluster does not wait until the first has allocated it.
    CopyNotAwaited,
    /// No round makes the old leaf durable after a snapshot has put another one on it.
    SnapshotWithoutRound,
    /// Data copied by a merge becomes durable a round after the leaf has dropped it.
    ForgottenBeforeCopied,
    /// Of a round, the upper layer is durable before the lower one.
    UpperLayerFirst,
    /// Data dropped by a merge is deallocated before the drop is durable.
    EarlyDeallocation,
    /// A write to a chunk that has been merged is allocated in the leaf as well.
    LeafGrows,
    /// A new cluster is filled up to the disk's end and not to its own, which shows when the disk grows.
    UnfilledEnd,
    /// A layer enlarged by a merge still reports that there is nothing after its old end.
    EndRemembered,
    /// The changes of an answered request are logged with the next one.
    LoggedAfterAnswer,
    /// Below the leaf, the space freed by a merge is logged, but not the copied data.
    LowerLayerLoggedLater,
    /// The log is dropped when a round is sealed, not when it is durable.
    LogDroppedEarly,
    /// The log of another image is applied.
    LogOfAnotherImage,
    /// A file gets a stamp from each process, and none after a round.
    StampOncePerProcess,
    /// The log still belongs to a file with the old stamp when the file has the new one.
    OldStampKept,
    /// While a file gets a new stamp, the log does not belong to it with the old one.
    OldStampForgotten,
    /// Pending writes below the leaf are dropped.
    ParentsDebtForgotten,
    /// Where there is no space for pending writes below the leaf, they are read from the log, and no flush waits for
    /// them.
    ParentsDebtOnlyRead,
    /// A read-only process ignores the log.
    LogNotRead,
    /// Pending writes are written without syncs in between.
    OwedWithoutSyncs,
    /// A failed sync is forgotten with the process that has seen it.
    FailedSyncForgotten,
    /// A failed sync below the leaf is forgotten with the process that has seen it.
    FailureBelowForgotten,
    /// When a compressed cluster moves, space shared with others is deallocated.
    SharedDeallocated,
    /// A cluster shared with an internal snapshot is overwritten in place.
    SharedOverwritten,
    /// A cluster with some subclusters allocated is recorded as fully allocated.
    RoundedSubclusters,
    /// A sync of an image does not include its data file.
    DataFileNotSynced,
    /// A copied L2 table is written together with the L1 entry that refers to it.
    EntryWithCopy,
    /// The refcounts of freed clusters are decreased together with the increases, before the entries are written.
    LoweredEarly,
    /// Space shared with an internal snapshot is deallocated when the disk frees it.
    SnapshotDeallocated,
    /// In version 2, a cluster of a child that must read as zero is freed, which shows the parent.
    OldZeroesForgotten,
    /// With large sectors: two sectors of a unit are read, changed and written concurrently.
    UnitNotAlone,
    /// With large sectors: a sector is answered while its unit is still being written.
    UnitAnsweredEarly,
    /// A split write is answered when the first of its pieces has ended.
    SplitAnsweredEarly,
    /// A failure of a part of a split or merged write is not reported.
    FailedPartHidden,
    /// Readers do not see where the target of a merge has put data that the guest wrote there.
    TargetNotShown,
    /// A part of a sector is written by a read and a write of the whole sector, between which others write.
    UnguardedPatch,
    /// The same without writes in between, but the read does not wait for earlier writes in flight.
    EarlyPatchRead,
    /// The files of merged layers are removed before the layer above records its new parent.
    SourcesRemovedFirst,
    /// They are removed when the new parent is recorded, but not durable.
    LinkNotDurable,
    /// They are removed by the next process, which finds the new parent recorded but does not make it durable.
    FinishedUndurably,
    /// A merge changes the leaf's parent link before the pending writes of the last process are durable.
    MergedBeforeReplay,
    /// The leaf still records the time of its parent's last change when the parent changes.
    ParentNeverForgotten,
    /// The same for layers below the leaf.
    ParentsNeverForgotten,
    /// The leaf has removed that time, but not durably, when its parent changes.
    ParentForgottenLate,
    /// Layers to be merged grow at the same time, the upper one not durably before the lower one.
    LayersGrowTogether,
    /// A rebased image records its new parent before anything is copied up.
    LinkedBeforeCopy,
    /// It records that before the copied data is durable.
    LinkedWithCopy,
    /// A rebase or flatten ends before that is durable.
    MoveNotDurable,
    /// A new child gets its name before it is durable.
    ChildNamedEarly,
    /// A copy gets its name before it is durable.
    CopyNamedEarly,
    /// A new leaf is used before its name is durable.
    NameNotDurable,
    /// A clone is reported as done before its name is durable.
    CloneNotDurable,
    /// A revert leaves the old chain before the new one is durable.
    RevertedEarly,
    /// An image records a new parent that is not durable.
    ParentsNotSynced,
    /// An intent in the map of changed blocks is written after the data.
    IntentAfterData,
    /// An intent is written, and not synced.
    IntentNotSynced,
    /// When a region gives up its intent, the bits that were set meanwhile are not written with that.
    BitsLostWithIntent,
    /// After a power loss a map is used as if it had been closed.
    IntentsIgnored,
    /// A torn page of a map is believed.
    TornPageBelieved,
    /// The map says that the disk has grown after the guest has used its new end.
    MapResizedLate,
    /// The map of the next interval begins when requests were let go on the new leaf.
    SwitchedLate,
}

/// The layers in which a bug is planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layers {
    /// The first leaf of the chain.
    Leaf,
    /// The layers below it.
    Below,
    /// All layers of the chain.
    All,
}

const NAMES: [(Planted, &str, &str); 88] = [
    (Planted::TableBeforeBitmap, "table-before-bitmap", "vhd"),
    (Planted::OneBatch, "one-batch", "vhd"),
    (Planted::EarlyCommit, "early-commit", "vhd"),
    (Planted::EarlyAnswer, "early-answer", "vhd"),
    (Planted::NoDataSync, "no-data-sync", "vhd"),
    (Planted::NoMiddleSync, "no-middle-sync", "vhd"),
    (Planted::EarlyReuse, "early-reuse", "vhd"),
    (Planted::RoundedBitmap, "rounded-bitmap", "vhd"),
    (Planted::EarlyBits, "early-bits", "vhd"),
    (Planted::OldFooter, "old-footer", "vhd"),
    (Planted::FooterOverBlock, "footer-over-block", "vhd"),
    (Planted::HeaderInPlace, "header-in-place", "vhd"),
    (Planted::FooterBeforeHeader, "footer-before-header", "vhd"),
    (Planted::SamePlace, "same-place", "vhd"),
    (Planted::LostAbandon, "lost-abandon", "vhd"),
    (Planted::LostRewrite, "lost-rewrite", "vhd"),
    (Planted::ParentShown, "parent-shown", "vhd"),
    (Planted::TrustedTail, "trusted-tail", "vhd"),
    (Planted::TrustedRelease, "trusted-release", "vhd"),
    (Planted::UnprovenPlace, "unproven-place", "vhd"),
    (Planted::DeviceEndForgotten, "device-end-forgotten", "vhd"),
    (Planted::RefcountAfterEntry, "refcount-after-entry", "qcow2"),
    (Planted::RefcountWithEntry, "refcount-with-entry", "qcow2"),
    (Planted::EntryBeforeData, "entry-before-data", "qcow2"),
    (Planted::EntryWithoutSync, "entry-without-sync", "qcow2"),
    (Planted::ReuseBeforeFlush, "reuse-before-flush", "qcow2"),
    (Planted::TornHeader, "torn-header", "qcow2"),
    (Planted::FillForgotten, "fill-forgotten", "qcow2"),
    (Planted::CopyNotAwaited, "copy-not-awaited", "qcow2"),
    (Planted::SnapshotWithoutRound, "snapshot-without-round", "chain"),
    (Planted::ForgottenBeforeCopied, "forgotten-before-copied", "chain"),
    (Planted::UpperLayerFirst, "upper-layer-first", "chain"),
    (Planted::EarlyDeallocation, "early-deallocation", "chain"),
    (Planted::LeafGrows, "leaf-grows", "chain"),
    (Planted::UnfilledEnd, "unfilled-end", "qcow2"),
    (Planted::EndRemembered, "end-remembered", "chain"),
    (Planted::LoggedAfterAnswer, "logged-after-answer", "qcow2"),
    (Planted::LowerLayerLoggedLater, "lower-layer-logged-later", "chain"),
    (Planted::LogDroppedEarly, "log-dropped-early", "vhd"),
    (Planted::LogOfAnotherImage, "log-of-another-image", "vhd"),
    (Planted::StampOncePerProcess, "stamp-once-per-process", "qcow2"),
    (Planted::OldStampKept, "old-stamp-kept", "vhd"),
    (Planted::OldStampForgotten, "old-stamp-forgotten", "qcow2"),
    (Planted::ParentsDebtForgotten, "parents-debt-forgotten", "chain"),
    (Planted::ParentsDebtOnlyRead, "parents-debt-only-read", "chain"),
    (Planted::LogNotRead, "log-not-read", "vhd"),
    (Planted::OwedWithoutSyncs, "owed-without-syncs", "qcow2"),
    (Planted::FailedSyncForgotten, "failed-sync-forgotten", "vhd"),
    (Planted::FailureBelowForgotten, "failure-below-forgotten", "chain"),
    (Planted::SharedDeallocated, "shared-deallocated", "qcow2"),
    (Planted::TargetNotShown, "target-not-shown", "chain"),
    (Planted::SharedOverwritten, "shared-overwritten", "qcow2"),
    (Planted::RoundedSubclusters, "rounded-subclusters", "qcow2"),
    (Planted::DataFileNotSynced, "data-file-not-synced", "qcow2"),
    (Planted::EntryWithCopy, "entry-with-copy", "qcow2"),
    (Planted::LoweredEarly, "lowered-early", "qcow2"),
    (Planted::SnapshotDeallocated, "snapshot-deallocated", "qcow2"),
    (Planted::OldZeroesForgotten, "old-zeroes-forgotten", "qcow2"),
    (Planted::UnguardedPatch, "unguarded-patch", "vhd"),
    (Planted::EarlyPatchRead, "early-patch-read", "qcow2"),
    (Planted::UnitNotAlone, "unit-not-alone", "vhd"),
    (Planted::UnitAnsweredEarly, "unit-answered-early", "vhd"),
    (Planted::SplitAnsweredEarly, "split-answered-early", "vhd"),
    (Planted::FailedPartHidden, "failed-part-hidden", "qcow2"),
    (Planted::SourcesRemovedFirst, "sources-removed-first", "chain"),
    (Planted::LinkNotDurable, "link-not-durable", "chain"),
    (Planted::FinishedUndurably, "finished-undurably", "chain"),
    (Planted::MergedBeforeReplay, "merged-before-replay", "chain"),
    (Planted::ParentNeverForgotten, "parent-never-forgotten", "chain"),
    (Planted::ParentsNeverForgotten, "parents-never-forgotten", "chain"),
    (Planted::ParentForgottenLate, "parent-forgotten-late", "chain"),
    (Planted::LayersGrowTogether, "layers-grow-together", "chain"),
    (Planted::LinkedBeforeCopy, "linked-before-copy", "chain"),
    (Planted::LinkedWithCopy, "linked-with-copy", "chain"),
    (Planted::MoveNotDurable, "move-not-durable", "chain"),
    (Planted::ChildNamedEarly, "child-named-early", "chain"),
    (Planted::CopyNamedEarly, "copy-named-early", "raw"),
    (Planted::NameNotDurable, "name-not-durable", "chain"),
    (Planted::CloneNotDurable, "clone-not-durable", "chain"),
    (Planted::RevertedEarly, "reverted-early", "chain"),
    (Planted::ParentsNotSynced, "parents-not-synced", "chain"),
    (Planted::IntentAfterData, "intent-after-data", "raw"),
    (Planted::IntentNotSynced, "intent-not-synced", "vhd"),
    (Planted::BitsLostWithIntent, "bits-lost-with-intent", "qcow2"),
    (Planted::IntentsIgnored, "intents-ignored", "raw"),
    (Planted::TornPageBelieved, "torn-page-believed", "raw"),
    (Planted::MapResizedLate, "map-resized-late", "qcow2"),
    (Planted::SwitchedLate, "switched-late", "chain"),
];

impl Planted {
    /// All planted bugs.
    pub fn all() -> impl Iterator<Item = Planted> {
        NAMES.into_iter().map(|(planted, _, _)| planted)
    }

    /// The format of the images in which it is searched for.
    pub fn format(self) -> &'static str {
        NAMES.iter().find(|(planted, _, _)| *planted == self).map_or("", |(_, _, format)| format)
    }

    /// The layers in which it is planted.
    pub fn layers(self) -> Layers {
        match self {
            Planted::ForgottenBeforeCopied | Planted::EndRemembered | Planted::LowerLayerLoggedLater => Layers::Below,
            Planted::TargetNotShown => Layers::Below,
            Planted::UpperLayerFirst | Planted::LeafGrows => Layers::All,
            _ => Layers::Leaf,
        }
    }

    /// Whether only a guest that writes parts of sectors can trigger it.
    pub fn is_about_parts(self) -> bool {
        matches!(self, Planted::UnguardedPatch | Planted::EarlyPatchRead)
    }

    /// Whether it is a bug in the map of changed blocks.
    pub fn is_about_changes(self) -> bool {
        matches!(
            self,
            Planted::IntentAfterData
                | Planted::IntentNotSynced
                | Planted::BitsLostWithIntent
                | Planted::IntentsIgnored
                | Planted::TornPageBelieved
                | Planted::MapResizedLate
                | Planted::SwitchedLate
        )
    }

    /// Faults without which the bug has no effect.
    pub fn faults(self) -> &'static [FaultKind] {
        match self {
            Planted::LostAbandon | Planted::LostRewrite | Planted::FailedPartHidden => &[FaultKind::NoSpace],
            Planted::TrustedRelease => &[FaultKind::Unsupported],
            Planted::FailedSyncForgotten | Planted::FailureBelowForgotten => &[FaultKind::Failed],
            _ => &[],
        }
    }
}

impl Planted {
    /// Whether it shows only with a full redo log, when the next process knows only the files.
    pub fn needs_full_log(self) -> bool {
        self == Planted::UnprovenPlace
    }
}

/// A write that needs a flush to be durable.
const WRITE: Op = Op::Write(Sectors { at: 0, count: 3 }, Durable::ByFlush);

impl Planted {
    /// The beginning of a workload that can trigger it, if few random ones would.
    pub fn needs(self) -> &'static [Op] {
        match self {
            Planted::SourcesRemovedFirst | Planted::LinkNotDurable | Planted::FinishedUndurably => {
                &[Chain(Step::Snapshot), Chain(Step::MergeBelow)]
            }
            // So that a round is in progress when the merge drops data.
            Planted::EarlyDeallocation => &[Chain(Step::Merge), Op::Flush, Op::Flush, Op::Flush, Op::Flush],
            Planted::ParentsNeverForgotten => &[Chain(Step::Snapshot), Chain(Step::MergeAll)],
            Planted::LayersGrowTogether => &[Chain(Step::Snapshot), Chain(Step::Grow), Chain(Step::MergeAll)],
            Planted::LinkedBeforeCopy | Planted::LinkedWithCopy => &[Chain(Step::Rebase)],
            Planted::MoveNotDurable => &[Chain(Step::Flatten)],
            Planted::ChildNamedEarly | Planted::CloneNotDurable => &[Chain(Step::Clone)],
            Planted::NameNotDurable => &[Chain(Step::Snapshot)],
            Planted::CopyNamedEarly => &[WRITE, Chain(Step::Copy)],
            Planted::RevertedEarly => &[WRITE, Chain(Step::Revert)],
            Planted::ParentsNotSynced => &[Chain(Step::Relink)],
            Planted::MapResizedLate => &[Chain(Step::Grow)],
            Planted::SwitchedLate => &[Chain(Step::Snapshot)],
            _ => &[],
        }
    }

    /// Whether it is triggered in few orders only: many short workloads then find it sooner than some long ones.
    pub fn needs_an_order(self) -> bool {
        self == Planted::EarlyDeallocation
    }
}

impl fmt::Display for Planted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(NAMES.iter().find(|(planted, _, _)| planted == self).map_or("", |(_, name, _)| name))
    }
}

impl FromStr for Planted {
    type Err = String;

    fn from_str(text: &str) -> Result<Planted, String> {
        let found = NAMES.iter().find(|(_, name, _)| *name == text).map(|(planted, _, _)| *planted);
        found.ok_or_else(|| {
            let names: Vec<_> = NAMES.iter().map(|(_, name, _)| *name).collect();
            format!("'{text}' is not a planted bug; there are {}", names.join(", "))
        })
    }
}
