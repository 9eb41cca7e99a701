//! The kinds of images and chains to explore: their layers, and the theme of their workloads.
//!
//! Knows nothing about how an image is created.

use std::fmt;
use std::str::FromStr;

use super::{Form, Layer, LayerType};
use crate::planted::Planted;
use crate::theme::Theme;
use crate::workload::{Op, Step};

/// A kind of image or chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A raw file.
    Raw,
    /// A fixed VHD.
    Fixed,
    /// A new dynamic VHD.
    Dynamic,
    /// A dynamic VHD whose first and last blocks hold data.
    Used,
    /// A new differencing VHD on a parent with data.
    Child,
    /// A differencing VHD with some sectors of its own in the first and last blocks.
    UsedChild,
    /// The same as once created by Tapline: opening it for writing corrects its header.
    MisspeltChild,
    /// A raw file that grows.
    GrowingRaw,
    /// A new qcow2 file.
    Qcow2,
    /// A qcow2 file with data whose first refcount block is nearly full.
    UsedQcow2,
    /// A new qcow2 file on a parent with data.
    ChildQcow2,
    /// A qcow2 child with some clusters of its own.
    UsedChildQcow2,
    /// A qcow2 file with compressed clusters and an allocated zero cluster.
    CompressedQcow2,
    /// The same on a parent with data.
    CompressedChildQcow2,
    /// A qcow2 file with an internal snapshot, which shares tables and clusters with the disk.
    SharedQcow2,
    /// The same on a parent with data.
    SharedChildQcow2,
    /// A qcow2 file with extended L2 entries, whose clusters have data in some subclusters.
    SubclusterQcow2,
    /// The same on a parent with data.
    SubclusterChildQcow2,
    /// A qcow2 file with an external data file, both of which contain data.
    DataFileQcow2,
    /// The same on a parent with data.
    DataFileChildQcow2,
    /// A qcow2 file with extended L2 entries and an external data file on a parent with data.
    SubclusterDataFileQcow2,
    /// A qcow2 file of version 2 with data.
    OldQcow2,
    /// A qcow2 file of version 2 on a parent with data.
    OldChildQcow2,
    /// A qcow2 file of version 2 with an internal snapshot.
    OldSharedQcow2,
    /// A used qcow2 file on one with an internal snapshot.
    Qcow2OnShared,
    /// A used qcow2 file on one with extended L2 entries.
    Qcow2OnSubclusters,
    /// A qcow2 file with extended L2 entries on a used one.
    SubclustersOnQcow2,
    /// A used qcow2 file on one with an external data file.
    Qcow2OnDataFile,
    /// A qcow2 file with an external data file on a used one.
    DataFileOnQcow2,
    /// A VHD on a VHD, both with data, to be merged.
    VhdOnVhd,
    /// A new VHD on a used one.
    NewVhdOnVhd,
    /// A new qcow2 file on a used one.
    NewQcow2OnQcow2,
    /// A qcow2 file with compressed clusters on a used one.
    CompressedOnQcow2,
    /// A used qcow2 file on one with compressed clusters.
    Qcow2OnCompressed,
    /// A VHD on a raw file.
    VhdOnRaw,
    /// A qcow2 file on another.
    Qcow2OnQcow2,
    /// A qcow2 file on a raw one.
    Qcow2OnRaw,
    /// A VHD on a qcow2 file.
    VhdOnQcow2,
    /// A qcow2 file on a VHD.
    Qcow2OnVhd,
    /// A VHD on a qcow2 file on a raw one.
    VhdOnQcow2OnRaw,
    /// A qcow2 file on a VHD on a raw file.
    Qcow2OnVhdOnRaw,
}

const fn layer(made: LayerType, preparation: &'static str) -> Layer {
    Layer { made, preparation }
}

/// Preparations of a leaf and its parent that are to be merged: data in the same block and in separate ones, and on
/// both sides of a chunk's border.
const IN_SOURCE: &str = "w1+2 w4094+4 w2050+1 f";
const IN_TARGET: &str = "w0+2 w6+2 w4095+4 w1030+1 f";
/// The preparation of a layer below both, with data that neither hides.
const IN_BASE: &str = "w0+9 w1030+2 w4090+10 f";

impl Kind {
    /// Whether a bug is searched for in images of this kind. A bug with shared clusters would be found elsewhere by its
    /// side effects, or not at all; all others need not be searched for in such images as well.
    pub fn is_searched_for(self, bug: Planted) -> bool {
        match bug {
            Planted::SharedOverwritten | Planted::EntryWithCopy => self.with_snapshot().is_some(),
            Planted::LoweredEarly | Planted::SnapshotDeallocated => self.with_snapshot().is_some(),
            Planted::RoundedSubclusters => self.is_of_subclusters(),
            Planted::DataFileNotSynced => self.has_data_file(),
            Planted::DeviceEndForgotten => self == Kind::Dynamic || self == Kind::Child,
            Planted::OldZeroesForgotten => self == Kind::OldChildQcow2,
            _ => !self.is_of_others(),
        }
    }

    /// All kinds of a format.
    pub fn of_format(format: &str) -> Option<&'static [Kind]> {
        match format {
            "raw" => Some(&[Kind::Raw, Kind::GrowingRaw]),
            "vhd" => Some(&[Kind::Dynamic, Kind::Used, Kind::Child, Kind::UsedChild, Kind::MisspeltChild, Kind::Fixed]),
            "qcow2" => Some(&[
                Kind::Qcow2,
                Kind::UsedQcow2,
                Kind::ChildQcow2,
                Kind::UsedChildQcow2,
                Kind::CompressedQcow2,
                Kind::CompressedChildQcow2,
                Kind::SharedQcow2,
                Kind::SharedChildQcow2,
                Kind::SubclusterQcow2,
                Kind::SubclusterChildQcow2,
                Kind::DataFileQcow2,
                Kind::DataFileChildQcow2,
                Kind::SubclusterDataFileQcow2,
                Kind::OldQcow2,
                Kind::OldChildQcow2,
                Kind::OldSharedQcow2,
            ]),
            "chain" => Some(&[
                Kind::VhdOnVhd,
                Kind::VhdOnRaw,
                Kind::Qcow2OnQcow2,
                Kind::Qcow2OnRaw,
                Kind::CompressedOnQcow2,
                Kind::Qcow2OnCompressed,
                Kind::Qcow2OnShared,
                Kind::Qcow2OnSubclusters,
                Kind::SubclustersOnQcow2,
                Kind::Qcow2OnDataFile,
                Kind::DataFileOnQcow2,
                Kind::VhdOnQcow2,
                Kind::Qcow2OnVhd,
                Kind::VhdOnQcow2OnRaw,
                Kind::Qcow2OnVhdOnRaw,
            ]),
            _ => None,
        }
    }

    /// The name of the format.
    pub fn format(self) -> &'static str {
        match self {
            Kind::Raw | Kind::GrowingRaw => "raw",
            Kind::Qcow2 | Kind::UsedQcow2 | Kind::ChildQcow2 | Kind::UsedChildQcow2 => "qcow2",
            Kind::CompressedQcow2 | Kind::CompressedChildQcow2 => "qcow2",
            Kind::SharedQcow2 | Kind::SharedChildQcow2 => "qcow2",
            Kind::SubclusterQcow2 | Kind::SubclusterChildQcow2 => "qcow2",
            Kind::DataFileQcow2 | Kind::DataFileChildQcow2 | Kind::SubclusterDataFileQcow2 => "qcow2",
            Kind::OldQcow2 | Kind::OldChildQcow2 | Kind::OldSharedQcow2 => "qcow2",
            Kind::VhdOnVhd | Kind::VhdOnRaw | Kind::Qcow2OnQcow2 | Kind::Qcow2OnRaw => "chain",
            Kind::NewVhdOnVhd | Kind::NewQcow2OnQcow2 | Kind::CompressedOnQcow2 | Kind::Qcow2OnCompressed => "chain",
            Kind::Qcow2OnShared | Kind::Qcow2OnSubclusters | Kind::SubclustersOnQcow2 => "chain",
            Kind::Qcow2OnDataFile | Kind::DataFileOnQcow2 => "chain",
            Kind::VhdOnQcow2 | Kind::Qcow2OnVhd | Kind::VhdOnQcow2OnRaw | Kind::Qcow2OnVhdOnRaw => "chain",
            Kind::Fixed | Kind::Dynamic | Kind::Used | Kind::Child | Kind::UsedChild | Kind::MisspeltChild => "vhd",
        }
    }

    /// Whether its layers are both VHD and qcow2.
    pub fn is_mixed(self) -> bool {
        let forms: Vec<Form> = self.layers().iter().map(|layer| layer.made.form()).collect();
        self.theme() == Theme::Chain && forms.contains(&Form::Vhd) && forms.contains(&Form::Qcow2)
    }

    /// Whether a layer has compressed clusters.
    pub fn is_packed(self) -> bool {
        self.layers().iter().any(|layer| layer.made == LayerType::CompressedQcow2)
    }

    /// The version of the layer with an internal snapshot, if there is one.
    pub fn with_snapshot(self) -> Option<u32> {
        self.layers().iter().find_map(|layer| match layer.made {
            LayerType::SharedQcow2 => Some(3),
            LayerType::OldSharedQcow2 => Some(2),
            _ => None,
        })
    }

    /// Whether it is of version 2, or has an internal snapshot, subclusters or a data file.
    pub fn is_of_others(self) -> bool {
        let foreign =
            [LayerType::SharedQcow2, LayerType::OldQcow2, LayerType::OldSharedQcow2, LayerType::SubclusterQcow2];
        self.has_data_file() || self.layers().iter().any(|layer| foreign.contains(&layer.made))
    }

    /// Whether a layer has a data file.
    pub fn has_data_file(self) -> bool {
        let made = [LayerType::DataFileQcow2, LayerType::SubclusterDataFileQcow2];
        self.layers().iter().any(|layer| made.contains(&layer.made))
    }

    /// Whether its leaf has room to record another parent; clusters of most qcow2 files here are too small.
    fn can_be_moved(self) -> bool {
        self.is_of_subclusters() && self.leaf() == Form::Qcow2 || self.leaf() == Form::Vhd
    }

    /// All workloads of exactly `len` operations about its theme.
    pub fn every(self, len: u32) -> impl Iterator<Item = Vec<Op>> {
        let copies = |ops: &[Op]| ops.contains(&Op::Chain(Step::Copy));
        let can = move |ops: &Vec<Op>| {
            (self.can_be_moved() || !ops.iter().any(|op| op.is_move())) && (self.leaf() == Form::Raw || !copies(ops))
        };
        self.theme().every(len).filter(can)
    }

    fn leaf(self) -> Form {
        self.layers().first().map_or(Form::Raw, |leaf| leaf.made.form())
    }

    /// Whether a layer has subclusters.
    pub fn is_of_subclusters(self) -> bool {
        let made = [LayerType::SubclusterQcow2, LayerType::SubclusterDataFileQcow2];
        self.layers().iter().any(|layer| made.contains(&layer.made))
    }

    /// Whether shorter workloads are explored on it than on others.
    pub fn has_less(self) -> bool {
        self.is_mixed() || self.is_packed() || self.is_of_others()
    }

    /// Whether its chain has so many layers that exploring all workloads would take too long.
    pub fn is_deep(self) -> bool {
        self.layers().len() > 2
    }

    /// How a new leaf is created on a layer of this format: with the same format or, in a mixed chain, the other one.
    pub fn leaf_on(self, below: Form) -> LayerType {
        match (below, self.is_mixed()) {
            (Form::Raw | Form::Vhd, false) | (Form::Raw | Form::Qcow2, true) => LayerType::Vhd,
            (Form::Qcow2, false) | (Form::Vhd, true) => LayerType::Qcow2,
        }
    }

    /// The theme of its workloads.
    pub fn theme(self) -> Theme {
        match self.format() {
            "chain" => Theme::Chain,
            // A snapshot of version 2 has no size of its own, and would take the new one.
            "qcow2" if self == Kind::OldSharedQcow2 => Theme::Image,
            // Their clusters are large: only a whole block exceeds a part of a cluster.
            "qcow2" if self.is_of_subclusters() => Theme::Image,
            "qcow2" => Theme::Growing,
            "raw" if self == Kind::GrowingRaw => Theme::Growing,
            _ => Theme::Image,
        }
    }

    /// Size of its disk in sectors.
    pub fn sectors(self) -> u64 {
        self.theme().sectors()
    }

    /// Size of its disk in sectors after it has grown.
    pub fn grown(self) -> u64 {
        self.theme().grown()
    }

    /// Its layers, leaf first.
    pub fn layers(self) -> Vec<Layer> {
        match self {
            Kind::Raw | Kind::GrowingRaw => vec![layer(LayerType::Raw, "")],
            Kind::Fixed => vec![layer(LayerType::Fixed, "")],
            Kind::Dynamic => vec![layer(LayerType::Vhd, "")],
            Kind::Used => vec![layer(LayerType::Vhd, "w0+6 w2050+2 f")],
            Kind::Child => vec![layer(LayerType::Vhd, ""), layer(LayerType::Given, "")],
            Kind::UsedChild => vec![layer(LayerType::Vhd, "w1+2 w5+1 w2049+1 f"), layer(LayerType::Given, "")],
            Kind::MisspeltChild => {
                vec![layer(LayerType::MisspeltVhd, "w1+2 w5+1 w2049+1 f"), layer(LayerType::Given, "")]
            }
            Kind::Qcow2 => vec![layer(LayerType::Qcow2, "")],
            Kind::UsedQcow2 => vec![layer(LayerType::FullQcow2, "w0+6 w2050+2 f")],
            Kind::ChildQcow2 => vec![layer(LayerType::Qcow2, ""), layer(LayerType::Given, "")],
            Kind::UsedChildQcow2 => vec![layer(LayerType::Qcow2, "w1+2 w5+1 w2049+1 f"), layer(LayerType::Given, "")],
            Kind::CompressedQcow2 => vec![layer(LayerType::CompressedQcow2, "")],
            Kind::CompressedChildQcow2 => {
                vec![layer(LayerType::CompressedQcow2, "w5+1 w2049+1 f"), layer(LayerType::Given, "")]
            }
            Kind::SharedQcow2 => vec![layer(LayerType::SharedQcow2, "")],
            Kind::SharedChildQcow2 => vec![layer(LayerType::SharedQcow2, ""), layer(LayerType::Given, "")],
            Kind::SubclusterQcow2 => vec![layer(LayerType::SubclusterQcow2, "")],
            Kind::SubclusterChildQcow2 => vec![layer(LayerType::SubclusterQcow2, ""), layer(LayerType::Given, "")],
            Kind::DataFileQcow2 => vec![layer(LayerType::DataFileQcow2, "w0+6 w2050+2 f")],
            Kind::DataFileChildQcow2 => {
                vec![layer(LayerType::DataFileQcow2, "w1+2 w5+1 w2049+1 f"), layer(LayerType::Given, "")]
            }
            Kind::SubclusterDataFileQcow2 => {
                vec![layer(LayerType::SubclusterDataFileQcow2, "w1+2 w5+1 w2049+1 f"), layer(LayerType::Given, "")]
            }
            Kind::OldQcow2 => vec![layer(LayerType::OldQcow2, "w0+6 w2050+2 f")],
            Kind::OldChildQcow2 => vec![layer(LayerType::OldQcow2, "w1+2 w5+1 w2049+1 f"), layer(LayerType::Given, "")],
            Kind::OldSharedQcow2 => vec![layer(LayerType::OldSharedQcow2, "")],
            Kind::Qcow2OnShared => vec![layer(LayerType::Qcow2, IN_SOURCE), layer(LayerType::SharedQcow2, "")],
            Kind::Qcow2OnSubclusters => vec![layer(LayerType::Qcow2, IN_SOURCE), layer(LayerType::SubclusterQcow2, "")],
            Kind::SubclustersOnQcow2 => {
                vec![layer(LayerType::SubclusterQcow2, "w2050+1 f"), layer(LayerType::Qcow2, IN_TARGET)]
            }
            Kind::Qcow2OnDataFile => {
                vec![layer(LayerType::Qcow2, IN_SOURCE), layer(LayerType::DataFileQcow2, IN_TARGET)]
            }
            Kind::DataFileOnQcow2 => {
                vec![layer(LayerType::DataFileQcow2, IN_SOURCE), layer(LayerType::Qcow2, IN_TARGET)]
            }
            Kind::CompressedOnQcow2 => {
                vec![layer(LayerType::CompressedQcow2, "w2050+1 f"), layer(LayerType::Qcow2, IN_TARGET)]
            }
            Kind::Qcow2OnCompressed => vec![layer(LayerType::Qcow2, IN_SOURCE), layer(LayerType::CompressedQcow2, "")],
            Kind::VhdOnVhd => vec![layer(LayerType::Vhd, IN_SOURCE), layer(LayerType::Vhd, IN_TARGET)],
            Kind::NewVhdOnVhd => vec![layer(LayerType::Vhd, ""), layer(LayerType::Vhd, IN_TARGET)],
            Kind::NewQcow2OnQcow2 => vec![layer(LayerType::Qcow2, ""), layer(LayerType::Qcow2, IN_TARGET)],
            Kind::VhdOnRaw => vec![layer(LayerType::Vhd, IN_SOURCE), layer(LayerType::Raw, IN_TARGET)],
            Kind::Qcow2OnQcow2 => vec![layer(LayerType::Qcow2, IN_SOURCE), layer(LayerType::Qcow2, IN_TARGET)],
            Kind::Qcow2OnRaw => vec![layer(LayerType::Qcow2, IN_SOURCE), layer(LayerType::Raw, IN_TARGET)],
            Kind::VhdOnQcow2 => vec![layer(LayerType::Vhd, IN_SOURCE), layer(LayerType::Qcow2, IN_TARGET)],
            Kind::Qcow2OnVhd => vec![layer(LayerType::Qcow2, IN_SOURCE), layer(LayerType::Vhd, IN_TARGET)],
            Kind::VhdOnQcow2OnRaw => [Kind::VhdOnQcow2.layers(), vec![layer(LayerType::Raw, IN_BASE)]].concat(),
            Kind::Qcow2OnVhdOnRaw => [Kind::Qcow2OnVhd.layers(), vec![layer(LayerType::Raw, IN_BASE)]].concat(),
        }
    }
}

const KINDS: [(Kind, &str); 41] = [
    (Kind::Raw, "raw"),
    (Kind::GrowingRaw, "growing-raw"),
    (Kind::Fixed, "fixed"),
    (Kind::Dynamic, "dynamic"),
    (Kind::Used, "used"),
    (Kind::Child, "child"),
    (Kind::UsedChild, "used-child"),
    (Kind::MisspeltChild, "misspelt-child"),
    (Kind::VhdOnVhd, "vhd-on-vhd"),
    (Kind::NewVhdOnVhd, "new-vhd-on-vhd"),
    (Kind::NewQcow2OnQcow2, "new-qcow2-on-qcow2"),
    (Kind::VhdOnRaw, "vhd-on-raw"),
    (Kind::Qcow2, "qcow2"),
    (Kind::UsedQcow2, "used-qcow2"),
    (Kind::ChildQcow2, "child-qcow2"),
    (Kind::UsedChildQcow2, "used-child-qcow2"),
    (Kind::CompressedQcow2, "compressed-qcow2"),
    (Kind::CompressedChildQcow2, "compressed-child-qcow2"),
    (Kind::SharedQcow2, "shared-qcow2"),
    (Kind::SharedChildQcow2, "shared-child-qcow2"),
    (Kind::SubclusterQcow2, "subcluster-qcow2"),
    (Kind::SubclusterChildQcow2, "subcluster-child-qcow2"),
    (Kind::DataFileQcow2, "data-file-qcow2"),
    (Kind::DataFileChildQcow2, "data-file-child-qcow2"),
    (Kind::SubclusterDataFileQcow2, "subcluster-data-file-qcow2"),
    (Kind::Qcow2OnDataFile, "qcow2-on-data-file"),
    (Kind::DataFileOnQcow2, "data-file-on-qcow2"),
    (Kind::OldQcow2, "old-qcow2"),
    (Kind::OldChildQcow2, "old-child-qcow2"),
    (Kind::OldSharedQcow2, "old-shared-qcow2"),
    (Kind::Qcow2OnShared, "qcow2-on-shared"),
    (Kind::Qcow2OnSubclusters, "qcow2-on-subclusters"),
    (Kind::SubclustersOnQcow2, "subclusters-on-qcow2"),
    (Kind::CompressedOnQcow2, "compressed-on-qcow2"),
    (Kind::Qcow2OnCompressed, "qcow2-on-compressed"),
    (Kind::Qcow2OnQcow2, "qcow2-on-qcow2"),
    (Kind::Qcow2OnRaw, "qcow2-on-raw"),
    (Kind::VhdOnQcow2, "vhd-on-qcow2"),
    (Kind::Qcow2OnVhd, "qcow2-on-vhd"),
    (Kind::VhdOnQcow2OnRaw, "vhd-on-qcow2-on-raw"),
    (Kind::Qcow2OnVhdOnRaw, "qcow2-on-vhd-on-raw"),
];

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = KINDS.iter().find(|(kind, _)| kind == self).map_or("", |(_, name)| name);
        f.write_str(name)
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Kind, String> {
        let found = KINDS.iter().find(|(_, name)| *name == text).map(|(kind, _)| *kind);
        found.ok_or_else(|| {
            let names: Vec<_> = KINDS.iter().map(|(_, name)| *name).collect();
            format!("'{text}' is not a kind of image; there are {}", names.join(", "))
        })
    }
}
