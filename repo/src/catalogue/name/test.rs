//! Names on the catalogue itself: which are refused, which are chosen, and that duplicates are kept.

use api::{VdiPatch, VmPatch};

use super::super::test::{image, room, sr, vdi, vm};
use super::super::{NewTask, NewVdi};
use super::*;

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn task(verb: &'static str) -> NewTask {
    NewTask { uuid: Uuid::new_v4(), verb, about: Vec::new(), cancellable: true, intent: None }
}

#[tokio::test]
async fn of_two_concurrent_requests_for_a_name_one_is_refused() {
    let room = room();
    let (sr, ..) = room.with_vdi(1).await;
    let ask = |n: u32| {
        let (catalogue, sr) = (room.catalogue.clone(), sr.uuid);
        tokio::spawn(async move {
            let asked = catalogue.write(move |tx| {
                let task = tx.add_task(&task("vdi-create"))?.uuid;
                tx.take_name(Among::Vdis(sr), &name(&format!("web{}", n % 2)), task, "create VDI 'web'")
            });
            asked.await.err()
        })
    };
    let asked: Vec<_> = (0..40).map(ask).collect();
    let mut refused = Vec::new();
    for one in asked {
        refused.extend(one.await.unwrap());
    }
    assert_eq!(refused.len(), 38, "two names were asked for");
    assert!(refused.iter().all(|problem| problem.code == Code::NameTaken));
}

#[tokio::test]
async fn a_refusal_says_what_has_the_name_and_since_when() {
    let room = room();
    let (sr, _, disk) = room.with_vdi(1).await;
    let asked = room.catalogue.read(move |view| {
        let created = view.vdi(disk)?.created;
        Ok((view.check_name_free(Among::Vdis(sr.uuid), &name("disk"), "create VDI 'disk'"), created))
    });
    let (refused, created) = asked.await.unwrap();
    let problem = refused.unwrap_err();
    let what = format!(
        "cannot create VDI 'disk': VDI {disk} in SR 'local' ({}), created {created:.0}, has that name",
        sr.uuid
    );
    assert_eq!((problem.detail, problem.field.as_deref()), (what, Some("name")));
    assert!(problem.advice.unwrap().ends_with(&format!("tapline vdi set {disk} --name NAME")));
}

#[tokio::test]
async fn a_name_is_taken_in_one_repository_only_and_for_one_kind_only() {
    let room = room();
    room.with_vdi(1).await;
    let other = sr();
    let other = api::Sr { name: name("other"), source: api::SrSource::Iso { path: "/iso".parse().unwrap() }, ..other };
    let uuid = other.uuid;
    let free = room.catalogue.write(move |tx| {
        tx.add_sr(&other)?;
        Ok([
            tx.is_name_free(Among::Vdis(uuid), &name("disk"))?,
            tx.is_name_free(Among::Vms, &name("disk"))?,
            tx.is_name_free(Among::Srs, &name("disk"))?,
            tx.is_name_free(Among::Srs, &name("other"))?,
        ])
    });
    assert_eq!(free.await.unwrap(), [true, true, true, false]);
}

#[tokio::test]
async fn renaming_to_a_taken_name_is_refused_and_to_its_own_is_not() {
    let room = room();
    let (sr, _, disk) = room.with_vdi(1).await;
    let second = image(sr.uuid, None);
    let new = NewVdi { name: name("data"), ..vdi(&second) };
    let uuid = new.uuid;
    room.catalogue.write(move |tx| tx.add_image(&second).and_then(|()| tx.add_vdi(&new))).await.unwrap();
    let rename = |to: &str| VdiPatch { name: Some(name(to)), ..VdiPatch::default() };
    for (to, refused) in [("disk", true), ("data", false), ("new", false)] {
        let patch = rename(to);
        let renamed = room.catalogue.write(move |tx| tx.patch_vdi(uuid, &patch).map(drop)).await;
        assert_eq!(
            renamed.map_err(|problem| problem.code),
            if refused { Err(Code::NameTaken) } else { Ok(()) },
            "{to}"
        );
    }
    // The name of what a task is creating is taken as well, until the task ends.
    let patch = rename("soon");
    let refused = room.catalogue.write(move |tx| {
        let task = tx.add_task(&task("vdi-create"))?.uuid;
        tx.take_name(Among::Vdis(sr.uuid), &name("soon"), task, "create VDI 'soon'")?;
        let refused = tx.patch_vdi(disk, &patch).unwrap_err();
        tx.end_task(task, Ok(serde_json::Value::Null))?;
        tx.patch_vdi(disk, &patch).map(|_| (refused, task))
    });
    let (problem, task) = refused.await.unwrap();
    assert_eq!(problem.code, Code::NameTaken);
    assert!(problem.detail.contains(&format!("the task {task} is creating a VDI of that name in SR 'local'")));
}

#[tokio::test]
async fn the_names_of_vms_are_unique() {
    let room = room();
    let (one, other) = (vm("web"), vm("web"));
    let uuid = one.uuid;
    room.catalogue.write(move |tx| tx.add_vm(&one)).await.unwrap();
    let refused = room.catalogue.write(move |tx| tx.add_vm(&other)).await.unwrap_err();
    assert_eq!(refused.code, Code::NameTaken);
    assert!(refused.detail.starts_with(&format!("cannot create VM 'web': VM {uuid}, created ")), "{refused}");
    let same = VmPatch { name: Some(name("web")), vcpus: Some(2), ..VmPatch::default() };
    room.catalogue.write(move |tx| tx.patch_vm(uuid, &same)).await.unwrap();
}

#[tokio::test]
async fn a_chosen_name_is_free_and_short_enough() {
    let room = room();
    let (sr, ..) = room.with_vdi(1).await;
    let at: Timestamp = "2026-11-23T02:07:31.5Z".parse().unwrap();
    let long = name(&"x".repeat(NAME_MAX));
    let found = room.catalogue.write(move |tx| {
        let among = Among::Vdis(sr.uuid);
        let mut found = Vec::new();
        for of in [name("disk"), name("disk"), name("disk"), long.clone()] {
            let chosen = tx.free_snapshot_name(among, &of, at)?;
            let image = image(sr.uuid, None);
            tx.add_image(&image)?;
            tx.add_vdi(&NewVdi { name: chosen.clone(), ..vdi(&image) })?;
            found.push(chosen.to_string());
        }
        found.push(tx.free_name(among, &name("disk"), "")?.to_string());
        Ok(found)
    });
    let expected = [
        "disk@2026-11-23T02:07",
        "disk@2026-11-23T02:07:31",
        "disk@2026-11-23T02:07:31-2",
        &format!("{}@2026-11-23T02:07", "x".repeat(NAME_MAX - 17)),
        "disk-2",
    ];
    assert_eq!(found.await.unwrap(), expected);
}

#[tokio::test]
async fn an_object_with_a_duplicate_name_can_be_changed() {
    let room = room();
    let (sr, _, disk) = room.with_vdi(1).await;
    let second = image(sr.uuid, None);
    // As a scan does with what it finds.
    let other = NewVdi { name: name("disk"), ..vdi(&second) };
    let of = [disk, other.uuid];
    room.catalogue.write(move |tx| tx.add_image(&second).and_then(|()| tx.add_vdi(&other))).await.unwrap();
    let described =
        VdiPatch { name: Some(name("disk")), description: Some("old".parse().unwrap()), ..VdiPatch::default() };
    room.catalogue.write(move |tx| tx.patch_vdi(of[0], &described)).await.unwrap();
    let refused =
        room.catalogue.read(move |view| view.check_name_free(Among::Vdis(sr.uuid), &name("disk"), "create VDI 'disk'"));
    assert_eq!(refused.await.unwrap_err().code, Code::NameTaken);
    let renamed = VdiPatch { name: Some(name("disk2")), ..VdiPatch::default() };
    room.catalogue.write(move |tx| tx.patch_vdi(of[1], &renamed)).await.unwrap();
}
