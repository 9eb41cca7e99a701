//! Clients that misuse STARTTLS and TLS, message by message.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use testkit::certificates::Authority;
use testkit::nbd::wire::{
    Command, Connection, OPTION_EXPORT_NAME, OPTION_GO, OPTION_LIST, OPTION_STARTTLS, option, request,
};

use crate::nbd_support::Served;
use crate::nbd_tls::Secure;

const ACK: u32 = 1;
const TLS_REQUIRED: u32 = (1 << 31) + 5;

/// The TLS state of a client with a certificate.
fn client(authority: &Authority) -> ClientConnection {
    let directory = authority.client().unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(directory.join("ca-cert.pem")).unwrap()).unwrap();
    let chain = vec![CertificateDer::from_pem_file(directory.join("client-cert.pem")).unwrap()];
    let key = PrivateKeyDer::from_pem_file(directory.join("client-key.pem")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = config.with_root_certificates(roots).with_client_auth_cert(chain, key).unwrap();
    ClientConnection::new(Arc::new(config), "localhost".try_into().unwrap()).unwrap()
}

/// A client that has sent STARTTLS, with `behind` in the same packet, and received its acknowledgement.
fn started(served: &Served, behind: &[u8]) -> Connection {
    let mut connection = served.greeted();
    connection.send(&[option(OPTION_STARTTLS, &[]), behind.to_vec()].concat()).unwrap();
    assert_eq!(connection.option_reply().unwrap(), (ACK, vec![]));
    connection
}

fn secured(connection: Connection, tls: ClientConnection) -> StreamOwned<ClientConnection, UnixStream> {
    StreamOwned::new(tls, connection.0)
}

/// Begins the transmission phase, and reads a block.
fn reads(stream: &mut StreamOwned<ClientConnection, UnixStream>) {
    stream.write_all(&option(OPTION_GO, &[0; 6])).unwrap();
    let mut replies = [0; 20 + 12 + 20 + 14 + 20];
    stream.read_exact(&mut replies).unwrap();
    stream.write_all(&request(Command::Read, 0, 7, 0, 512)).unwrap();
    let mut reply = [1; 16 + 512];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!((&reply[4..8], &reply[8..16], &reply[16..]), (&[0; 4][..], &7u64.to_be_bytes()[..], &[0; 512][..]));
}

/// A good client is served.
fn assert_serves(secure: &Secure) {
    reads(&mut secured(started(&secure.served, &[]), client(&secure.authority)));
}

fn logged(secure: &Secure, words: &str) -> bool {
    secure.served.events.lock().unwrap().iter().any(|event| event.contains(words))
}

#[test]
fn options_in_clear_text_behind_starttls_are_never_processed() {
    let secure = Secure::unix();
    // Alone, and in front of a true handshake, as a third party would insert it.
    for with_handshake in [false, true] {
        let mut connection = started(&secure.served, &option(OPTION_LIST, &[]));
        if with_handshake {
            let mut stream = secured(connection, client(&secure.authority));
            assert!(stream.write_all(&option(OPTION_GO, &[0; 6])).and_then(|()| stream.read_exact(&mut [0])).is_err());
            continue;
        }
        let mut rest = Vec::new();
        connection.0.read_to_end(&mut rest).unwrap();
        // At most an alert, and no reply in clear text.
        assert!(!rest.windows(8).any(|bytes| bytes == 0x0003_e889_0455_65a9_u64.to_be_bytes()), "{rest:?}");
    }
    assert_serves(&secure);
    assert!(logged(&secure, "TLS: received corrupt message"), "{:?}", secure.served.events.lock().unwrap());
}

#[test]
fn a_handshake_in_the_packet_of_starttls_continues() {
    let secure = Secure::unix();
    let mut tls = client(&secure.authority);
    let mut hello = Vec::new();
    tls.write_tls(&mut hello).unwrap();
    // Each cut of it, in the same packet or later.
    for cut in [0, 1, 5, hello.len() - 1, hello.len()] {
        let mut connection = started(&secure.served, &hello[..cut]);
        connection.send(&hello[cut..]).unwrap();
        // The server's part of the handshake: a record of the type 'handshake'.
        assert_eq!(connection.receive(1).unwrap(), [22], "cut at {cut}");
    }
    let mut tls = client(&secure.authority);
    let mut hello = Vec::new();
    tls.write_tls(&mut hello).unwrap();
    reads(&mut secured(started(&secure.served, &hello), tls));
}

#[test]
fn nothing_is_served_before_tls() {
    let secure = Secure::unix();
    let mut connection = secure.served.greeted();
    connection.option(OPTION_GO, &[0; 6]).unwrap();
    assert_eq!(connection.option_reply().unwrap().0, TLS_REQUIRED);
    connection.option(OPTION_LIST, &[]).unwrap();
    assert_eq!(connection.option_reply().unwrap().0, TLS_REQUIRED);
    connection.option(OPTION_EXPORT_NAME, &[]).unwrap();
    assert!(connection.is_disconnected());
    assert_serves(&secure);
    assert!(logged(&secure, "the client does not use TLS, which is required"));
}

#[test]
fn starttls_within_tls_is_refused() {
    let secure = Secure::unix();
    let mut stream = secured(started(&secure.served, &[]), client(&secure.authority));
    stream.write_all(&option(OPTION_STARTTLS, &[])).unwrap();
    let mut reply = [0; 20];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(reply[12..16], ((1u32 << 31) + 3).to_be_bytes());
}

#[test]
fn stalled_handshakes_cost_one_slot_each() {
    let secure = Secure::unix();
    let mut served = secured(started(&secure.served, &[]), client(&secure.authority));
    reads(&mut served);
    let mut hello = Vec::new();
    client(&secure.authority).write_tls(&mut hello).unwrap();
    let mut stalled: Vec<Connection> =
        (0..100).map(|round| started(&secure.served, &hello[..hello.len() * (round % 3) / 2])).collect();
    assert_serves(&secure);
    assert!(stalled.iter_mut().take(80).all(Connection::is_disconnected));
    // The client that was served before is served still.
    served.write_all(&request(Command::Read, 0, 8, 0, 512)).unwrap();
    served.read_exact(&mut [0; 16 + 512]).unwrap();
}

#[test]
fn records_that_are_not_authentic_end_only_their_connection() {
    let secure = Secure::unix();
    let mut stream = secured(started(&secure.served, &[]), client(&secure.authority));
    reads(&mut stream);
    // A record of application data whose tag is wrong.
    stream.sock.write_all(&[&[23, 3, 3, 0, 64][..], &[7; 64]].concat()).unwrap();
    assert!(stream.read_exact(&mut [0]).is_err());
    assert_serves(&secure);
    assert!(logged(&secure, "TLS: cannot decrypt peer's message"), "{:?}", secure.served.events.lock().unwrap());
}

#[test]
fn endless_handshake_messages_end_their_connection() {
    let secure = Secure::unix();
    // A hello of 16 MiB, of which each record has 16 KiB.
    let mut connection = started(&secure.served, &[22, 3, 1, 64, 0, 1, 255, 255, 255]);
    let record = [&[22, 3, 1, 64, 0][..], &[0; 16384]].concat();
    let sent = connection.0.write_all(&record.repeat(1024));
    assert!(sent.is_err() || connection.is_disconnected());
    assert_serves(&secure);
}

#[test]
fn large_writes_arrive_in_small_records_and_reads_wait_for_their_reader() {
    let secure = Secure::unix();
    let mut tls = client(&secure.authority);
    tls.set_buffer_limit(None);
    let mut stream = secured(started(&secure.served, &[]), tls);
    reads(&mut stream);
    let data: Vec<u8> = (0..4 << 20).map(|at: u32| at.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
    let write = [request(Command::Write, 0, 1, 512, 4 << 20), data.clone()].concat();
    // Records of 1 byte, then of 5000, across the boundaries of messages.
    write[..64].iter().for_each(|byte| stream.write_all(&[*byte]).unwrap());
    write[64..].chunks(5000).for_each(|bytes| stream.write_all(bytes).unwrap());
    stream.read_exact(&mut [0; 16]).unwrap();
    let reads: Vec<u8> = (0..16).flat_map(|cookie| request(Command::Read, 0, cookie, 512, 4 << 20)).collect();
    stream.write_all(&reads).unwrap();
    for _ in 0..16 {
        let mut reply = vec![0; 16 + data.len()];
        stream.read_exact(&mut reply).unwrap();
        assert!(reply[16..] == data);
    }
}

#[test]
fn a_clean_end_is_answered_by_a_clean_end() {
    let secure = Secure::unix();
    let mut stream = secured(started(&secure.served, &[]), client(&secure.authority));
    reads(&mut stream);
    stream.write_all(&request(Command::Disconnect, 0, 0, 0, 0)).unwrap();
    // Not UnexpectedEof, which a cut would be.
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
}
