//! Valid requests in every layout, and invalid ones.

use crate::data::{describe, fill, get, put, whole};
use crate::entry::{Abi, INDIRECT, READ, Rings, WRITE, discard, indirect, transfer};
use crate::fixture::{Fixture, PERSISTENT, one_page};
use crate::image::{self, SECTORS, sectors};
use crate::{ERROR, OKAY, UNSUPPORTED};

const BARRIER: u8 = 2;
const FLUSH: u8 = 3;
const DISCARD: u8 = 5;

const ABIS: [Abi; 3] = [Abi::Native, Abi::X86_32, Abi::X86_64];

#[test]
fn every_abi_transfers_whole_requests_with_every_policy() {
    Fixture::each_policy(|mut fixture, policy| {
        for (turn, abi) in (0..).zip(ABIS) {
            fixture.connect(Rings { abi, ..PERSISTENT });
            let front = &mut fixture.front;
            let (data, list) = (front.pages(256), front.pages(1));
            // 11 segments, the first and the last within their pages: 3 to 7, nine whole ones, 0 to 2.
            let mut parts = whole(&data.pages[..11]);
            (parts[0].1, parts[10].2) = (3, 2);
            let (at, len) = (4096 + turn * 128, 5 + 9 * 8 + 3);
            let content = sectors(1 << 40..(1 << 40) + 88);
            put(&data.bytes, &content);
            let id = u64::MAX - turn;
            assert_eq!(front.run_all(0, &[transfer(WRITE, id, at, &parts)]), [(id, WRITE, OKAY)], "{policy} {abi:?}");
            let written = &content[3 * 512..][..len as usize * 512];
            assert!(fixture.image.bytes_of(at..at + len) == written, "{policy} {abi:?}");
            fill(&data.bytes, 0);
            assert_eq!(front.run(&transfer(READ, 1, at, &parts)), OKAY);
            let read = get(&data.bytes, 11 * 4096);
            assert!(read[3 * 512..][..written.len()] == *written, "{policy} {abi:?}");
            assert!(
                read[..3 * 512].iter().chain(&read[(88 - 5) * 512..]).all(|&byte| byte == 0),
                "outside the segments"
            );

            // A mebibyte in one request.
            describe(&list, &whole(&data.pages));
            let answers = front.run_all(0, &[indirect(READ, id, 512, list.pages[0], 256)]);
            assert_eq!(answers, [(id, READ, OKAY)], "{policy} {abi:?}");
            assert!(get(&data.bytes, 1 << 20) == sectors(512..2560), "{policy} {abi:?}");

            let entries =
                [transfer(FLUSH, 2, 0, &[]), transfer(BARRIER, 3, 0, &[]), discard(0, 4, 8192 + turn * 64, 64)];
            let done = [(2, FLUSH, OKAY), (3, BARRIER, OKAY), (4, DISCARD, OKAY)];
            assert_eq!(front.run_all(0, &entries), done, "{policy} {abi:?}");
            fixture.close();
        }
        let mut written: Vec<_> = (0..3).map(|turn| 4096 + turn * 128..4096 + turn * 128 + 80).collect();
        written.push(8192..8192 + 192);
        fixture.end(&written);
    });
}

#[test]
fn sixteen_pages_and_four_queues_are_full_at_once() {
    Fixture::each_policy(|mut fixture, policy| {
        fixture.connect(Rings { order: 4, queues: 4, ..PERSISTENT });
        let front = &mut fixture.front;
        let data = front.pages(4);
        for round in 0..2u64 {
            for (queue, &page) in data.pages.iter().enumerate() {
                let request = |id: u64| transfer(READ, id << 32 | round, id * 8 + queue as u64, &[(page, 0, 7)]);
                (0..512).for_each(|id| front.put(queue, &request(id)));
            }
            (0..4).for_each(|queue| front.push(queue));
            for queue in 0..4 {
                let mut answers = front.await_answers(queue, 512);
                answers.sort_unstable();
                let all = (0..512u64).map(|id| (id << 32 | round, READ, OKAY));
                assert!(answers.into_iter().eq(all), "{policy}, queue {queue}");
            }
        }
        fixture.close();
        fixture.end(&[]);
    });
}

#[test]
fn only_invalid_requests_are_refused() {
    Fixture::each_policy(|mut fixture, policy| {
        fixture.connect(PERSISTENT);
        let front = &mut fixture.front;
        let (page, data) = one_page(front);
        let list = front.pages(1);
        fill(&data.bytes, 0xaa);
        let one = [(page, 0, 7)];
        let bad_parts = [(page, 3, 2), (page, 0, 8), (page, 8, 8), (page, 255, 255), (page, 0, 255), (page, 7, 0)];
        let mut cases = vec![
            (transfer(WRITE, 0, 0, &[]), ERROR),
            (transfer(READ, 0, 0, &[]), ERROR),
            (transfer(WRITE, 0, 0, &[(page, 0, 7); 11]), OKAY),
            (transfer(WRITE, 0, SECTORS - 8, &one), OKAY),
            (transfer(WRITE, 0, SECTORS - 7, &one), ERROR),
            (transfer(WRITE, 0, SECTORS, &one), ERROR),
            (transfer(READ, 0, SECTORS, &one), ERROR),
            (transfer(WRITE, 0, u64::MAX, &one), ERROR),
            (transfer(WRITE, 0, u64::MAX / 512, &one), ERROR),
            (transfer(WRITE, 0, 1 << 55, &one), ERROR),
            (discard(0, 0, SECTORS, 8), ERROR),
            (discard(0, 0, 0, SECTORS + 1), ERROR),
            (discard(0, 0, 8, u64::MAX), ERROR),
            (discard(0, 0, u64::MAX, u64::MAX), ERROR),
            (discard(0, 0, 0, 0), ERROR),
            (discard(1, 0, 64, 8), UNSUPPORTED),
            (discard(0xff, 0, 64, 8), UNSUPPORTED),
            (indirect(READ, 0, 0, list.pages[0], 0), ERROR),
            (indirect(WRITE, 0, 0, list.pages[0], 257), ERROR),
            (indirect(WRITE, 0, 0, list.pages[0], u16::MAX), ERROR),
            (indirect(DISCARD, 0, 0, list.pages[0], 1), UNSUPPORTED),
            (indirect(INDIRECT, 0, 0, list.pages[0], 1), UNSUPPORTED),
            (indirect(FLUSH, 0, 0, list.pages[0], 1), UNSUPPORTED),
            (indirect(BARRIER, 0, 0, list.pages[0], 1), UNSUPPORTED),
        ];
        cases.extend(bad_parts.map(|part| (transfer(WRITE, 0, 0, &[part]), ERROR)));
        cases.extend([4u8, 7, 8, 127, 255].map(|unknown| (transfer(unknown, 0, 0, &one), UNSUPPORTED)));
        for count in [12, 13, 255u8] {
            let mut many = transfer(WRITE, 0, 0, &one);
            many[1] = count;
            cases.push((many, ERROR));
        }
        for (number, (entry, status)) in cases.iter_mut().enumerate() {
            let id = (number as u64) << 48 | 0xdead_beef;
            entry[4..12].copy_from_slice(&id.to_le_bytes());
            let answer = front.run_all(0, &[*entry])[0];
            assert_eq!((answer.0, answer.2), (id, *status), "{policy}: entry {number}");
        }
        for part in bad_parts {
            describe(&list, &[(page, 0, 7), part]);
            assert_eq!(front.run(&indirect(WRITE, 1, 0, list.pages[0], 2)), ERROR, "{policy}: {part:?}");
        }
        fixture.close();
        fixture.end(&[0..88, SECTORS - 8..SECTORS]);
    });
}

#[test]
fn a_read_only_disk_is_not_changed() {
    let Some(mut fixture) = Fixture::new(&["--read-only"]) else { return };
    fixture.connect(PERSISTENT);
    let front = &mut fixture.front;
    let (page, data) = one_page(front);
    let list = front.pages(1);
    describe(&list, &[(page, 0, 7)]);
    fill(&data.bytes, 0xaa);
    assert_eq!(front.run(&transfer(WRITE, 1, 0, &[(page, 0, 7)])), ERROR);
    assert_eq!(front.run(&transfer(BARRIER, 2, 0, &[(page, 0, 7)])), ERROR);
    assert_eq!(front.run(&indirect(WRITE, 3, 0, list.pages[0], 1)), ERROR);
    assert_eq!(front.run(&discard(0, 4, 0, 64)), ERROR);
    assert_eq!(front.run(&transfer(FLUSH, 5, 0, &[])), OKAY);
    assert_eq!(front.run(&transfer(READ, 6, 8, &[(page, 0, 7)])), OKAY);
    assert!(get(&data.bytes, 4096) == sectors(8..16));
    fixture.close();
    fixture.end(&[]);
}

#[test]
fn requests_beyond_the_memory_limit_wait_in_the_ring() {
    Fixture::each_policy(|mut fixture, policy| {
        fixture.connect(Rings { order: 3, ..PERSISTENT });
        let front = &mut fixture.front;
        let (data, list) = (front.pages(256), front.pages(1));
        describe(&list, &whole(&data.pages));
        (0..256).for_each(|id| front.put(0, &indirect(READ, id, id * 8, list.pages[0], 256)));
        front.push(0);
        let mut most = 0;
        let mut answers = 0;
        while answers < 256 {
            most = most.max(fixture.process.memory());
            answers += front.await_answers(0, 1).len();
        }
        assert!(most < 48 << 10, "{policy}: {most} KiB for 256 MiB of requests");
        assert_eq!(get(&data.bytes, 512).len(), 512);
        fixture.close();
        fixture.end(&[]);
    });
}

#[test]
fn an_out_of_range_index_ends_only_its_own_queue() {
    let Some(mut fixture) = Fixture::new(&["--queues", "4"]) else { return };
    for index in [33, 1000, u32::MAX, 1 << 31, 5] {
        fixture.connect(Rings { queues: 2, ..PERSISTENT });
        let front = &mut fixture.front;
        let (page, _data) = one_page(front);
        let request = |id| transfer(READ, id, 0, &[(page, 0, 7)]);
        // Ten requests are done, so 5 is a decreasing index.
        assert_eq!(front.run_all(0, &(0..10).map(request).collect::<Vec<_>>()).len(), 10);
        front.announce(0, if index == 5 { 5 } else { 10u32.wrapping_add(index) });
        assert_eq!(front.run_all(1, &[request(77)]), [(77, READ, OKAY)], "the other queue still works");
        assert_eq!(front.responses(0), []);
        // It stays broken with a valid index.
        front.announce(0, 11);
        assert_eq!(front.run_all(1, &[request(78)]), [(78, READ, OKAY)]);
        assert_eq!(front.responses(0), []);
        fixture.close();
    }
    assert!(fixture.process.log_text().contains("is broken by its front end"), "{}", fixture.process.log_text());
    fixture.end(&[]);
}

#[test]
fn a_ring_used_as_its_own_data_does_not_affect_other_disks() {
    Fixture::each_policy(|mut fixture, _| {
        for sector in 0..8 {
            fixture.connect(PERSISTENT);
            let front = &mut fixture.front;
            let ring = front.rings[0].pages[0];
            // A read overwrites the ring with its indices and the entry itself; a write stores the ring on the disk; an
            // indirect request has the ring as its list of descriptors. None of them needs a response.
            front.put(0, &transfer(READ, 1, sector, &[(ring, 0, 7)]));
            front.put(0, &transfer(WRITE, 2, image::SECTORS - 8, &[(ring, 0, 7)]));
            front.put(0, &indirect(READ, 3, 0, ring, 256));
            front.push(0);
            front.wait_for_notification(200);
            fixture.bystander.work();
            fixture.close();
        }
        fixture.end(&[image::SECTORS - 8..image::SECTORS]);
    });
}
