//! Grants that are not what they should be, and those that are taken back.

use xen::{DomId, GrantRef};

use crate::bed::{Bed, PERSISTENT, one_page};
use crate::data::{describe, fill, whole};
use crate::entry::{READ, Rings, WRITE, indirect, transfer};
use crate::front::OURS;
use crate::{ERROR, OKAY};

#[test]
fn a_bad_grant_is_an_error_of_its_request_alone() {
    Bed::each_policy(|mut bed, policy| {
        bed.connect(PERSISTENT);
        let front = &mut bed.front;
        let (good, good_page) = one_page(front);
        fill(&good_page.bytes, 0x11);
        let (revoked, page) = one_page(front);
        let sealed = front.memory.grant(OURS, 1, true).unwrap();
        let others = front.memory.grant(DomId(77), 1, false).unwrap();
        let (list, sealed, others_page) = (front.pages(1), sealed.pages[0], others.pages[0]);
        // The last: whoever is granted something next gets its number.
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
        bed.close();
        bed.end(&[0..8]);
    });
}

#[test]
fn a_page_taken_back_while_requests_run_fails_them_at_most() {
    Bed::each_policy(|mut bed, policy| {
        bed.connect(PERSISTENT);
        for round in 0..20u32 {
            let front = &mut bed.front;
            let (data, list) = (front.pages(256), front.pages(1));
            describe(&list, &whole(&data.pages));
            for id in 0..8 {
                front.put(0, &indirect(READ, id, id * 8, list.pages[0], 256));
                front.put(0, &transfer(WRITE, id, 8192, &[(data.pages[id as usize], 0, 7)]));
            }
            front.push(0);
            // At a different moment each time.
            let answered = if round < 10 { front.await_answers(0, round as usize).len() } else { 0 };
            drop((data, list));
            let left = front.await_answers(0, 16 - answered);
            assert_eq!(answered + left.len(), 16, "{policy}");
            assert!(left.iter().all(|answer| [OKAY, ERROR].contains(&answer.2)), "{policy}: {left:?}");
        }
        bed.close();
        bed.end(&[8192..8200]);
    });
}

#[test]
fn a_ring_taken_back_is_served_until_it_is_let_go() {
    Bed::each_policy(|mut bed, policy| {
        bed.connect(Rings { order: 2, ..PERSISTENT });
        let front = &mut bed.front;
        let (data, list) = (front.pages(256), front.pages(1));
        describe(&list, &whole(&data.pages));
        (0..64).for_each(|id| front.put(0, &indirect(READ, id, 0, list.pages[0], 256)));
        front.push(0);
        // Our mapping and our end of the channel go while it works.
        let ring = front.rings.remove(0);
        xen::EventChannels::unbind(&mut front.channels, ring.port).unwrap();
        drop((ring, data, list));
        bed.beside.work();
        bed.victim.assert_lives();
        bed.close();
        assert!(!bed.victim.said().contains("panicked"), "{policy}");
        bed.end(&[]);
    });
}
