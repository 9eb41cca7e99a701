//! Requests for which there is no room: in the format, or on the storage.

use super::clusters::{CLUSTER, Clusters};
use super::*;

/// The request for a write to a new cluster, as it is answered.
fn answered(change: impl FnOnce(&mut Rig<Clusters>)) -> (Status, bool) {
    let mut rig = Rig::new(vec![Clusters::new(8 * CLUSTER)], vec![Vec::new()], 1);
    rig.files.room = 1000;
    rig.read(0, 512);
    change(&mut rig);
    let bytes = Segments::copy_of(&[7; 512]);
    let request = rig.request(Operation::Write { durable: false }, 0, 512, bytes, 1);
    rig.disk.submit(request, &mut rig.files);
    loop {
        if let Some((request, status)) = rig.disk.answer() {
            let at_limit = request.at_limit;
            request.retire();
            return (status, at_limit);
        }
        let mut done = Vec::new();
        rig.files.reap(Until::Now, &mut done).unwrap();
        done.into_iter().for_each(|done| rig.disk.settle(done, &mut rig.files));
    }
}

#[test]
fn what_a_format_has_no_room_for_is_told_from_what_the_storage_has_no_space_for() {
    assert_eq!(answered(|_| ()), (Status::Done, false));
    assert_eq!(answered(|rig| rig.files.full = Some(0)), (Status::NoSpace, false));
    assert_eq!(answered(|rig| rig.disk.chain.at_mut(0).format.at_limit = true), (Status::NoSpace, true));
}
