//! Bugs of the kinds that formats and disks really had.
//!
//! Nothing in production code knows of them: [`crate::saboteur`] plants them around a format and around an engine. An
//! explorer that misses one of them is not worth running.

use std::fmt;
use std::str::FromStr;

use crate::fault::FaultKind;
use crate::workload::Op::Chain;
use crate::workload::{Durable, Op, Sectors, Step};

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Planted {
    /// The table is written before the bitmaps it refers to.
    TableBeforeBitmap,
    /// Table and bitmaps are written together.
    OneBatch,
    /// A write becomes visible, and part of the next round, when it is begun.
    EarlyCommit,
    /// A flush is answered without its last sync.
    EarlyAnswer,
    /// A round begins without syncing the data.
    NoDataSync,
    /// No sync between the bitmaps and the table.
    NoMiddleSync,
    /// A discarded block's place is given away before the table that freed it is durable.
    EarlyReuse,
    /// Bitmaps are written with whole bytes set: eight sectors where one was written.
    RoundedBitmap,
    /// A bitmap is sealed with the bits of writes that are still under way.
    EarlyBits,
    /// The footer is written where it used to be, so that nothing makes the file long enough for its new block.
    OldFooter,
    /// The footer is written where the next block will begin.
    FooterOverBlock,
    /// A new header is written over the old one, to which the footer still leads.
    HeaderInPlace,
    /// A footer is written before the header that it leads to.
    FooterBeforeHeader,
    /// Two blocks that are allocated at the same time get the same place.
    SamePlace,
    /// A write that failed is taken for one that succeeded.
    LostAbandon,
    /// Metadata whose write failed is not written again.
    LostRewrite,
    /// A discard in a differencing image clears the bits of what is discarded, which shows the parent again.
    ParentShown,
    /// Space behind the end of the file is taken for zeros on storage where it is not.
    TrustedTail,
    /// A place is called clean though it could not be deallocated.
    TrustedRelease,
    /// A block is placed where a killed process has given one up before that is durable.
    UnprovenPlace,
    /// A device is believed to be larger than it is.
    DeviceEndForgotten,
    /// A cluster's refcount is written after the entry that refers to it.
    RefcountAfterEntry,
    /// Refcounts and the entries that refer to the clusters are written together.
    RefcountWithEntry,
    /// A cluster becomes visible, and part of the next round, before its data is written.
    EntryBeforeData,
    /// A round has no sync but its last.
    EntryWithoutSync,
    /// A freed cluster is given away before the entry that freed it is durable.
    ReuseBeforeFlush,
    /// The header is written before the tables that it points to.
    TornHeader,
    /// Copy on write without the bytes around the write.
    FillForgotten,
    /// A second write to a cluster does not wait until the first has given it its place.
    CopyNotAwaited,
    /// No round makes the old leaf durable once a snapshot has put another on it.
    SnapshotWithoutRound,
    /// What a merge has copied becomes durable a round after the leaf has forgotten it.
    ForgottenBeforeCopied,
    /// Of a round, the upper layer is durable before the lower one.
    UpperLayerFirst,
    /// What a merge has forgotten is deallocated before that is durable.
    EarlyDeallocation,
    /// What is written to a chunk that has been merged gets a place in the leaf, too.
    LeafGrows,
    /// A new cluster is filled up to the disk's end and not to its own, which comes to light when the disk grows.
    UnfilledEnd,
    /// A layer that a merge has made larger says that there is nothing behind its old end.
    EndRemembered,
    /// What an answered request has changed is logged with the next one.
    LoggedAfterAnswer,
    /// The same, below the leaf: what a merge has freed is logged, and what it has copied is not.
    LowerLayerLoggedLater,
    /// The log is dropped when a round is sealed, not when it is durable.
    LogDroppedEarly,
    /// The log of another image is believed.
    LogOfAnotherImage,
    /// A file gets a stamp from each process, and none after a round.
    StampOncePerProcess,
    /// The log is of a file with the old stamp too when the file has the new one.
    OldStampKept,
    /// While a file gets a new stamp, the log is not of it with the old one.
    OldStampForgotten,
    /// What was left to be written below the leaf is forgotten.
    ParentsDebtForgotten,
    /// Where there is no space for what was left to be written below the leaf, it is read from the log, and no flush
    /// waits for it.
    ParentsDebtOnlyRead,
    /// Who only reads does not look into the log.
    LogNotRead,
    /// What was left to be written is written without syncs in between.
    OwedWithoutSyncs,
    /// That a sync has failed is forgotten with the process that has seen it.
    FailedSyncForgotten,
    /// That a sync below the leaf has failed is forgotten with the process that has seen it.
    FailureBelowForgotten,
    /// When a compressed cluster moves, all is deallocated that it has shared with others.
    SharedDeallocated,
    /// A cluster that an internal snapshot has too is overwritten in place.
    SharedOverwritten,
    /// A cluster of which some subclusters are in the file is written down as if all were.
    RoundedSubclusters,
    /// A sync of an image with a data file is none of the data file.
    DataFileNotSynced,
    /// An L2 table that was copied is written with the L1 entry that refers to it.
    EntryWithCopy,
    /// The refcount of what is freed is lowered together with the refcounts that rise, before the entries are
    /// written.
    LoweredEarly,
    /// What the disk has shared with an internal snapshot is deallocated when the disk gives it up.
    SnapshotDeallocated,
    /// In version 2, a cluster of a child that is to read as zero loses its place, which shows the parent.
    OldZeroesForgotten,
    /// On storage of large sectors: two sectors of a unit are read, changed and written at once.
    UnitNotAlone,
    /// There also: a sector is answered when its unit is on its way to the storage, and not there.
    UnitAnsweredEarly,
    /// A write that was split is answered when the first of its pieces has ended.
    SplitAnsweredEarly,
    /// Of a write that went on as others, or with others, it is not seen that it failed.
    FailedPartHidden,
    /// Readers are not shown where the target of a merge has put what the guest wrote there.
    TargetNotShown,
    /// A part of a sector is written by a read and a write of all of it, between which others write.
    UnguardedPatch,
    /// The same, and nothing comes between, but the read does not wait for writes under way to what it reads.
    EarlyPatchRead,
    /// The files of merged layers are removed before the layer above records its new parent.
    SourcesRemovedFirst,
    /// They are removed when it has recorded that, and before it is durable.
    LinkNotDurable,
    /// They are removed by the process that takes over, which finds it recorded, and does not make it durable.
    FinishedUndurably,
    /// A merge changes what the leaf records before what the last process has left is durable.
    MergedBeforeReplay,
    /// The leaf still records when its parent was last changed when that changes.
    ParentNeverForgotten,
    /// The same below the leaf.
    ParentsNeverForgotten,
    /// The leaf has forgotten that, but not durably, when its parent changes.
    ParentForgottenLate,
    /// Layers that are to be merged grow at the same time, the upper one not durably before the lower one.
    LayersGrowTogether,
    /// An image that is rebased records its new parent before anything is copied up.
    LinkedBeforeCopy,
    /// It records that before what was copied up is durable.
    LinkedWithCopy,
    /// A rebase or flatten ends before that is durable.
    MoveNotDurable,
    /// A new child has its name before it is durable.
    ChildNamedEarly,
    /// A copy has its name before it is durable.
    CopyNamedEarly,
    /// A new leaf is used before its name is durable.
    NameNotDurable,
    /// A clone is answered for before its name is durable.
    CloneNotDurable,
    /// A revert leaves the old chain before that is durable.
    RevertedEarly,
    /// An image records a new parent that is not durable.
    ParentsNotSynced,
}

/// Layers in which a bug lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layers {
    /// The leaf with which the chain began.
    Leaf,
    /// Those below it.
    Below,
    /// All.
    All,
}

const NAMES: [(Planted, &str, &str); 81] = [
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
];

impl Planted {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Planted> {
        NAMES.into_iter().map(|(planted, _, _)| planted)
    }

    /// The format of the images in which it is looked for.
    pub fn format(self) -> &'static str {
        NAMES.iter().find(|(planted, _, _)| *planted == self).map_or("", |(_, _, format)| format)
    }

    /// Where in a chain it lives.
    pub fn layers(self) -> Layers {
        match self {
            Planted::ForgottenBeforeCopied | Planted::EndRemembered | Planted::LowerLayerLoggedLater => Layers::Below,
            Planted::TargetNotShown => Layers::Below,
            Planted::UpperLayerFirst | Planted::LeafGrows => Layers::All,
            _ => Layers::Leaf,
        }
    }

    /// Whether only a guest that writes parts of sectors can meet it.
    pub fn is_about_parts(self) -> bool {
        matches!(self, Planted::UnguardedPatch | Planted::EarlyPatchRead)
    }

    /// What must go wrong below for the bug to matter.
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
    /// Whether it is seen only where the redo log is full, and the next process knows what the files say and no more.
    pub fn needs_full_log(self) -> bool {
        self == Planted::UnprovenPlace
    }
}

/// A write that is not durable.
const WRITE: Op = Op::Write(Sectors { at: 0, count: 3 }, Durable::ByFlush);

impl Planted {
    /// What a workload begins with that can meet it, where few would by chance.
    pub fn needs(self) -> &'static [Op] {
        match self {
            Planted::SourcesRemovedFirst | Planted::LinkNotDurable | Planted::FinishedUndurably => {
                &[Chain(Step::Snapshot), Chain(Step::MergeBelow)]
            }
            // A round that is under way when the merge forgets something.
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
            _ => &[],
        }
    }

    /// Whether it is met in few orders of what it needs: many short workloads then find it sooner than some long ones.
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
