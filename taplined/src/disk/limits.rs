//! Limits of disks: conversion between the API and the control protocol.

use api::{Code, DiskLimits, Problem};
use control::limits::Limits;

/// The limits of a disk, as its process takes them.
pub fn to_process(limits: Option<&DiskLimits>) -> Limits {
    let Some(limits) = limits else { return Limits::default() };
    let DiskLimits { iops, read_iops, write_iops, bandwidth, read_bandwidth, write_bandwidth, burst_ms } = *limits;
    Limits { iops, read_iops, write_iops, bandwidth, read_bandwidth, write_bandwidth, burst_ms }
}

/// The limits that a process reports; `None` if there are none.
pub fn of_process(limits: Limits) -> Option<DiskLimits> {
    let Limits { iops, read_iops, write_iops, bandwidth, read_bandwidth, write_bandwidth, burst_ms } = limits;
    let limits = DiskLimits { iops, read_iops, write_iops, bandwidth, read_bandwidth, write_bandwidth, burst_ms };
    Some(limits).filter(|limits| *limits != DiskLimits::default())
}

/// Validates limits; limits that are all unset become `None`.
pub fn checked(limits: Option<DiskLimits>) -> Result<Option<DiskLimits>, Problem> {
    let Some(limits) = limits.filter(|limits| *limits != DiskLimits::default()) else { return Ok(None) };
    match to_process(Some(&limits)).check() {
        Ok(()) => Ok(Some(limits)),
        Err(error) => {
            let problem = Problem::new(Code::Invalid, error.message).field("limits");
            Err(Problem { advice: error.advice, ..problem })
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn an_empty_object_is_no_limit_and_nonsense_is_refused() {
        assert_eq!(checked(Some(DiskLimits::default())).unwrap(), None);
        let some = DiskLimits { iops: Some(5000), burst_ms: Some(500), ..DiskLimits::default() };
        assert_eq!(checked(Some(some)).unwrap(), Some(some));
        let refused = checked(Some(DiskLimits { iops: Some(0), ..some })).unwrap_err();
        assert_eq!((refused.code, refused.field.as_deref()), (Code::Invalid, Some("limits")));
        assert_eq!(refused.advice.as_deref(), Some("leave it out for no limit"));
        assert!(checked(Some(DiskLimits { iops: None, ..some })).is_err(), "a burst alone");
    }
}
