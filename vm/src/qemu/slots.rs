//! The PCI slot of a disk, determined by its position alone, and its interrupts.
//!
//! It knows nothing about QEMU's syntax. Invariant: the slot of a position never changes, so that a hot-plugged disk is
//! where it would be after a boot; and the interrupts of all positions together fit into every guest
//! (docs/decisions/0010-qemu-hardware.md).

use serde::{Deserialize, Serialize};

/// Disks of a machine at most.
pub const DISKS_MAX: u8 = 255;

/// The bridges for them, all present from the start: a bridge cannot be hot-plugged together with its devices.
pub const BRIDGES: u8 = 9;

/// Slots of a bridge that we use. It has a slot 0 too, which a bridge with a hot-plug controller of its own lacks.
pub const SLOTS: u8 = 31;

/// The slot of the cloud-init seed: behind the last bridge, after all disks. Linux names disks in the order of their
/// slots, and the seed must not take the name of the first one.
pub const SEED_SLOT: PciSlot = PciSlot { bridge: BRIDGES - 1, slot: SLOTS };

/// The slot of the first bridge on the machine's own bus; below it are the chipset, screen, network and console.
pub const FIRST_BRIDGE_SLOT: u8 = 0x10;

/// The default limit on a disk's queues: more do not help the single thread that serves them.
const QUEUES_DEFAULT_MAX: u16 = 4;

/// Positions whose queues have interrupts of their own. A processor has about 200 vectors; such a disk uses one per
/// processor, plus one.
const OWN_VECTORS: u8 = 64;

/// From this number of processors on, the disks after those share vectors: two per disk, on any processor. With fewer
/// processors there are not enough.
const VCPUS_TO_SHARE: u16 = 4;

/// The index of a disk of a machine: 0 to 254.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct Position(u8);

/// A slot behind a bridge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PciSlot {
    /// 0 to 8.
    pub bridge: u8,
    /// 1 to 31.
    pub slot: u8,
}

impl Position {
    /// The position with this number, if a machine has it.
    pub fn new(number: u8) -> Option<Self> {
        (number < DISKS_MAX).then_some(Self(number))
    }

    /// Every position.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..DISKS_MAX).map(Self)
    }

    /// The index of the disk: 0 to 254.
    pub fn number(self) -> u8 {
        self.0
    }

    /// Where its disk is.
    pub fn pci_slot(self) -> PciSlot {
        PciSlot { bridge: self.0 / SLOTS, slot: self.0 % SLOTS + 1 }
    }

    /// MSI-X vectors of its disk; none: it uses a shared interrupt line.
    ///
    /// Linux gives each queue a vector of its own if there is one for each plus one, and reserves those on every
    /// processor. With two vectors for several queues it shares them and allocates them wherever there is space.
    pub fn vectors(self, vcpus: u16, queues: u16) -> u16 {
        if self.0 < OWN_VECTORS {
            queues.saturating_add(1)
        } else if vcpus >= VCPUS_TO_SHARE && queues > 1 {
            2
        } else {
            0
        }
    }
}

impl From<Position> for u8 {
    fn from(position: Position) -> u8 {
        position.0
    }
}

impl TryFrom<u8> for Position {
    type Error = String;

    fn try_from(number: u8) -> Result<Self, String> {
        Self::new(number).ok_or_else(|| format!("disk {number}: disk numbers are 0 to {}", DISKS_MAX - 1))
    }
}

/// The default number of a disk's queues.
pub fn queues_default(vcpus: u16) -> u16 {
    vcpus.clamp(1, QUEUES_DEFAULT_MAX)
}

#[cfg(test)]
mod test {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_position_has_its_own_slot_on_an_existing_bridge() {
        let places: Vec<PciSlot> = Position::all().map(Position::pci_slot).collect();
        assert_eq!(places.len(), 255);
        assert!(places.iter().all(|place| place.bridge < BRIDGES && (1..=SLOTS).contains(&place.slot)));
        let different: BTreeSet<(u8, u8)> = places.iter().map(|place| (place.bridge, place.slot)).collect();
        assert_eq!(different.len(), 255);
        assert!(places.iter().all(|place| (place.bridge, place.slot) < (SEED_SLOT.bridge, SEED_SLOT.slot)));
        assert_eq!(Position::new(0).unwrap().pci_slot(), PciSlot { bridge: 0, slot: 1 });
        assert_eq!(Position::new(31).unwrap().pci_slot(), PciSlot { bridge: 1, slot: 1 });
        assert_eq!(Position::new(255), None);
    }

    /// As Linux 6.1 allocates them: with one vector per queue plus one, each queue's vector is reserved on all
    /// processors that it serves, so one per processor and disk; all others are on one processor each.
    #[test]
    fn the_vectors_of_all_disks_fit_into_every_guest() {
        for vcpus in 1..=64 {
            let queues = queues_default(vcpus);
            let (mut on_each, mut anywhere) = (0, 0);
            for vectors in Position::all().map(|position| position.vectors(vcpus, queues)) {
                match vectors {
                    0 => {}
                    own if own > queues => (on_each, anywhere) = (on_each + 1, anywhere + 1),
                    shared => anywhere += shared,
                }
            }
            let busiest = on_each + anywhere.div_ceil(vcpus);
            assert!(busiest < 190, "{vcpus} processors: {busiest} vectors on one");
        }
    }

    #[test]
    fn queues_follow_the_processors_up_to_four() {
        assert_eq!([0, 1, 3, 4, 64].map(queues_default), [1, 1, 3, 4, 4]);
    }

    #[test]
    fn a_position_is_parsed_only_if_it_exists() {
        assert_eq!(serde_json::from_str::<Position>("254").unwrap().number(), 254);
        assert!(serde_json::from_str::<Position>("255").unwrap_err().to_string().contains("disk numbers are 0 to 254"));
        assert_eq!(serde_json::to_string(&Position::new(7).unwrap()).unwrap(), "7");
    }
}
