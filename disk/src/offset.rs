//! Where a byte is: in a file, or on the disk. The compiler keeps the two apart.
//!
//! Knows nothing of what is there. A length is a plain number, and so is the distance between two offsets of one kind;
//! `+` and `-` overflow as they do for numbers. Numbers that come from outside are made offsets where they are parsed,
//! and are numbers again where the kernel or a person gets them.

use std::ops::{AddAssign, Div, Rem, Sub};

/// A number of something, with the arithmetic that makes sense for one: how many there are between two of them is a
/// plain number.
macro_rules! number {
    ($(#[$doc:meta])* $name:ident($of:ident)) => {
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $of);

        #[allow(dead_code, reason = "not each kind needs all of it")]
        impl $name {
            /// How many there are from `first` to here, unless this is in front of it.
            #[inline]
            pub fn checked_sub(self, first: $name) -> Option<$of> {
                self.0.checked_sub(first.0)
            }

            /// How many there are from `first` to here; none if this is in front of it.
            #[inline]
            pub fn saturating_sub(self, first: $name) -> $of {
                self.0.saturating_sub(first.0)
            }
        }

        impl ::std::ops::Add<$of> for $name {
            type Output = $name;

            #[inline(always)]
            fn add(self, count: $of) -> $name {
                $name(self.0 + count)
            }
        }

        impl ::std::ops::Sub for $name {
            type Output = $of;

            #[inline(always)]
            fn sub(self, first: $name) -> $of {
                self.0 - first.0
            }
        }

        impl ::std::fmt::Display for $name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

pub(crate) use number;

/// An offset: a number of a byte.
macro_rules! offset {
    ($(#[$doc:meta])* $name:ident) => {
        number! {
            $(#[$doc])*
            $name(u64)
        }

        impl $name {
            /// `len` bytes further on, unless that is too large a number.
            #[inline]
            pub fn checked_add(self, len: u64) -> Option<$name> {
                self.0.checked_add(len).map($name)
            }

            /// `len` bytes further on, or the largest offset.
            #[inline]
            pub fn saturating_add(self, len: u64) -> $name {
                $name(self.0.saturating_add(len))
            }

            /// Here or before, at a multiple of `unit`.
            #[inline(always)]
            pub fn align_down(self, unit: u64) -> $name {
                $name(self.0 / unit * unit)
            }

            /// Here or behind, at a multiple of `unit`.
            #[inline]
            pub fn align_up(self, unit: u64) -> $name {
                $name(self.0.next_multiple_of(unit))
            }

            /// The same, unless that is too large a number.
            #[inline]
            pub fn checked_align_up(self, unit: u64) -> Option<$name> {
                self.0.checked_next_multiple_of(unit).map($name)
            }
        }

        impl AddAssign<u64> for $name {
            #[inline(always)]
            fn add_assign(&mut self, len: u64) {
                self.0 += len;
            }
        }

        impl Sub<u64> for $name {
            type Output = $name;

            #[inline(always)]
            fn sub(self, len: u64) -> $name {
                $name(self.0 - len)
            }
        }

        /// Bytes since the last multiple of a unit.
        impl Rem<u64> for $name {
            type Output = u64;

            #[inline(always)]
            fn rem(self, unit: u64) -> u64 {
                self.0 % unit
            }
        }

        /// How many units are in front of the one that it is in.
        impl Div<u64> for $name {
            type Output = u64;

            #[inline(always)]
            fn div(self, unit: u64) -> u64 {
                self.0 / unit
            }
        }
    };
}

offset! {
    /// A byte of a file of the chain. Of a layer with a data file it may be in either: see [`crate::DATA_FILE`].
    FileOffset
}

offset! {
    /// A byte of the disk, as the guest counts.
    DiskOffset
}

impl DiskOffset {
    /// Where the byte is in a file that has every byte of the disk where the disk has it.
    #[inline(always)]
    pub fn in_flat_file(self) -> FileOffset {
        FileOffset(self.0)
    }
}

/// Bytes `at..at + len` of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileRange {
    /// The first byte.
    pub at: FileOffset,
    /// Number of bytes.
    pub len: u64,
}

impl FileRange {
    /// The offset behind the last byte.
    #[inline]
    pub fn end(self) -> FileOffset {
        self.at + self.len
    }
}
