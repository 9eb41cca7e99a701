//! Trees of images, intact and broken. There are no files: the images' metadata is made up here.

use super::*;

fn image(file: &str, format: ImageFormat) -> Found {
    let file = Candidate { file: file.into(), format, len: 4096, physical: 4096, numbers: None, known: None };
    Found { file, size: 1 << 30, identity: None, hidden: false, parent: None }
}

fn id(number: u128) -> Uuid {
    Uuid::from_u128(number)
}

/// A VHD with an identity; its parent, if any, is given by identity and name.
fn vhd(file: &str, own: u128, parent: Option<(u128, &str)>) -> Found {
    let recorded = |(identity, file): (u128, &str)| Recorded {
        identity: Some(id(identity)),
        file: Some(file.into()),
        format: Some(ImageFormat::Vhd),
        shown: format!("'{file}'"),
    };
    Found { identity: Some(id(own)), parent: parent.map(recorded), ..image(file, ImageFormat::Vhd) }
}

/// A qcow2 without an identity, as other programs create them.
fn qcow2(file: &str, parent: Option<&str>) -> Found {
    let recorded =
        |file: &str| Recorded { identity: None, file: Some(file.into()), format: None, shown: format!("'{file}'") };
    Found { parent: parent.map(recorded), ..image(file, ImageFormat::Qcow2) }
}

fn known(found: Found) -> Found {
    Found { file: Candidate { known: Some(Uuid::new_v4()), ..found.file.clone() }, ..found }
}

/// Files with the files of their parents, in placement order, and whether they have children.
fn placed(placement: &Placement) -> Vec<(&str, Option<&str>, bool)> {
    let placed = placement.placed.iter();
    placed.map(|one| (&*one.found.file.file, one.parent.as_deref(), one.below_others)).collect()
}

fn refused(placement: &Placement) -> Vec<(&str, Code)> {
    placement.unplaced.iter().map(|unplaced| (&*unplaced.file, unplaced.problem.code)).collect()
}

#[test]
fn a_tree_is_placed_parents_first() {
    let all = vec![
        vhd("a-leaf.vhd", 1, Some((3, "z-base.vhd"))),
        vhd("b-leaf.vhd", 2, Some((3, "z-base.vhd"))),
        vhd("z-base.vhd", 3, None),
        qcow2("alone.qcow2", None),
        image("plain.raw", ImageFormat::Raw),
    ];
    let placement = place(all);
    assert!(placement.unplaced.is_empty());
    let mut got = placed(&placement);
    assert!(got.iter().position(|one| one.0 == "z-base.vhd") < got.iter().position(|one| one.0 == "a-leaf.vhd"));
    got.sort();
    let want = [
        ("a-leaf.vhd", Some("z-base.vhd"), false),
        ("alone.qcow2", None, false),
        ("b-leaf.vhd", Some("z-base.vhd"), false),
        ("plain.raw", None, false),
        ("z-base.vhd", None, true),
    ];
    assert_eq!(got, want);
}

#[test]
fn a_vhd_is_found_by_its_identity_before_its_name() {
    let renamed = place(vec![vhd("leaf.vhd", 1, Some((2, "old name.vhd"))), vhd("base.vhd", 2, None)]);
    assert_eq!(placed(&renamed).last().unwrap(), &("leaf.vhd", Some("base.vhd"), false));
    // Another image has the name that the child records: it would show the guest wrong data.
    let replaced = place(vec![vhd("leaf.vhd", 1, Some((2, "base.vhd"))), vhd("base.vhd", 7, None)]);
    assert_eq!(refused(&replaced), [("leaf.vhd", Code::NotFound)]);
    assert!(replaced.unplaced.first().unwrap().problem.detail.contains(&id(7).to_string()));
}

#[test]
fn a_raw_image_or_a_qcow2_without_identity_is_found_by_its_name() {
    let placement = place(vec![qcow2("leaf.qcow2", Some("base.qcow2")), qcow2("base.qcow2", None)]);
    assert_eq!(placed(&placement).last().unwrap(), &("leaf.qcow2", Some("base.qcow2"), false));
    let mut on_raw = qcow2("leaf.qcow2", Some("base.img"));
    on_raw.parent.as_mut().unwrap().format = Some(ImageFormat::Raw);
    assert_eq!(placed(&place(vec![on_raw, image("base.img", ImageFormat::Raw)])).len(), 2);
    let mut of_other_format = qcow2("leaf.qcow2", Some("base.qcow2"));
    of_other_format.parent.as_mut().unwrap().format = Some(ImageFormat::Vhd);
    let wrong = place(vec![of_other_format, qcow2("base.qcow2", None)]);
    assert_eq!(refused(&wrong), [("leaf.qcow2", Code::NotFound)]);
}

#[test]
fn known_images_are_parents_and_not_placed_again() {
    let placement = place(vec![known(vhd("base.vhd", 1, None)), vhd("leaf.vhd", 2, Some((1, "base.vhd")))]);
    assert_eq!(placed(&placement), [("leaf.vhd", Some("base.vhd"), false)]);
}

#[test]
fn a_missing_parent_is_reported_for_all_descendants() {
    let all = vec![
        vhd("c.vhd", 3, Some((2, "b.vhd"))),
        vhd("b.vhd", 2, Some((1, "a.vhd"))),
        qcow2("elsewhere.qcow2", Some("gone.qcow2")),
    ];
    let placement = place(all);
    assert!(placement.placed.is_empty());
    assert_eq!(refused(&placement).len(), 3);
    let why = |at: usize| &*placement.unplaced.get(at).unwrap().problem.detail;
    assert!(why(0).contains("'a.vhd' is not in this repository"), "{}", why(0));
    assert!(why(1).contains("'b.vhd' is unplaced"), "{}", why(1));
}

#[test]
fn a_loop_of_parents_is_refused_with_all_descendants() {
    let all = vec![
        vhd("a.vhd", 1, Some((2, "b.vhd"))),
        vhd("b.vhd", 2, Some((1, "a.vhd"))),
        vhd("above.vhd", 3, Some((1, "a.vhd"))),
        qcow2("self.qcow2", Some("self.qcow2")),
        qcow2("fine.qcow2", None),
    ];
    let placement = place(all);
    assert_eq!(placed(&placement), [("fine.qcow2", None, false)]);
    let invalid = |file| (file, Code::Invalid);
    assert_eq!(refused(&placement), ["a.vhd", "above.vhd", "b.vhd", "self.qcow2"].map(invalid));
}

#[test]
fn of_two_equal_identities_the_known_image_stays() {
    let both = place(vec![vhd("a.vhd", 1, None), vhd("b.vhd", 1, None), vhd("leaf.vhd", 2, Some((1, "a.vhd")))]);
    assert!(placed(&both).is_empty());
    assert_eq!(refused(&both).iter().filter(|one| one.1 == Code::Exists).count(), 2);
    let copied = place(vec![known(vhd("a.vhd", 1, None)), vhd("copy.vhd", 1, None)]);
    assert_eq!(refused(&copied), [("copy.vhd", Code::Exists)]);
}

#[test]
fn a_long_chain_is_placed_in_any_file_order() {
    let all = (1..=3000).map(|n: u128| vhd(&format!("{n}.vhd"), n, (n > 1).then_some((n - 1, "?")))).rev();
    let placement = place(all.collect());
    assert_eq!((placement.placed.len(), placement.unplaced.len()), (3000, 0));
}
