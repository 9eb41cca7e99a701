//! Invalid and revoked grants.

use xen::{DomId, GrantRef};

use crate::data::{describe, fill, whole};
use crate::entry::{READ, Rings, WRITE, indirect, transfer};
use crate::fixture::{Fixture, PERSISTENT, one_page};
use crate::front::OURS;
use crate::{ERROR, OKAY};

#[test]
fn a_bad_grant_fails_only_its_own_request() {
    Fixture::each_policy(|mut fixture, policy| {
        fixture.connect(PERSISTENT);
        let front = &mut fixture.front;
        let (good, good_page) = one_page(front);
        fill(&good_page.bytes, 0x11);
        let (revoked, page) = one_page(front);
        let sealed = front.memory.grant(OURS, 1, true).unwrap();
        let others = front.memory.grant(DomId(77), 1, false).unwrap();
        let (list, sealed, others_page) = (front.pages(1), sealed.pages[0], others.pages[0]);
        // Revoked last, because the next grant would get its number.
        drop(page);
        for bad in [revoked, others_page, GrantRef(0), GrantRef(1 << 20), GrantRef(u32::MAX)] {
            describe(&list, &[(good, 0, 7), (bad, 0, 7), (good, 0, 7)]);
            let entries = [
                transfer(WRITE, 0, 0, &[(good, 0, 7)]),
                transfer(WRITE, 1, 8, &[(good, 0, 7), (bad, 0, 7)]),
                transfer(WRITE, 2, 16, &[(bad, 0, 7)]),
                transfer(READ, 3, 0, &[(bad, 0, 7)]),
                transfer(READ, 4, 0, &[(sealed, 0, 7)]),
                indirect(READ, 5, 0, bad, 12),
                indirect(WRITE, 6, 8, list.pages[0], 3),
                transfer(READ, 7, 0, &[(good, 0, 7)]),
            ];
            let answers = front.run_all(0, &entries);
            let statuses: Vec<i16> = answers.iter().map(|answer| answer.2).collect();
            assert_eq!(statuses, [OKAY, ERROR, ERROR, ERROR, ERROR, ERROR, ERROR, OKAY], "{policy}: {bad:?}");
        }
        fixture.close();
        fixture.end(&[0..8]);
    });
}

#[test]
fn revoking_a_page_during_requests_at_most_fails_them() {
    Fixture::each_policy(|mut fixture, policy| {
        fixture.connect(PERSISTENT);
        for round in 0..20u32 {
            let front = &mut fixture.front;
            let (data, list) = (front.pages(256), front.pages(1));
            describe(&list, &whole(&data.pages));
            for id in 0..8 {
                front.put(0, &indirect(READ, id, id * 8, list.pages[0], 256));
                front.put(0, &transfer(WRITE, id, 8192, &[(data.pages[id as usize], 0, 7)]));
            }
            front.push(0);
            // At a different point each time.
            let answered = if round < 10 { front.await_answers(0, round as usize).len() } else { 0 };
            drop((data, list));
            let left = front.await_answers(0, 16 - answered);
            assert_eq!(answered + left.len(), 16, "{policy}");
            assert!(left.iter().all(|answer| [OKAY, ERROR].contains(&answer.2)), "{policy}: {left:?}");
        }
        fixture.close();
        fixture.end(&[8192..8200]);
    });
}

#[test]
fn a_revoked_ring_is_served_until_it_is_released() {
    Fixture::each_policy(|mut fixture, policy| {
        fixture.connect(Rings { order: 2, ..PERSISTENT });
        let front = &mut fixture.front;
        let (data, list) = (front.pages(256), front.pages(1));
        describe(&list, &whole(&data.pages));
        (0..64).for_each(|id| front.put(0, &indirect(READ, id, 0, list.pages[0], 256)));
        front.push(0);
        // Our mapping and our port are dropped while the process serves the ring.
        let ring = front.rings.remove(0);
        xen::EventChannels::unbind(&mut front.channels, ring.port).unwrap();
        drop((ring, data, list));
        fixture.bystander.work();
        fixture.process.assert_running();
        fixture.close();
        assert!(!fixture.process.log_text().contains("panicked"), "{policy}");
        fixture.end(&[]);
    });
}
