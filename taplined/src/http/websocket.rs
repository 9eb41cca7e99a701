//! The server's side of a WebSocket (RFC 6455) that carries a stream of bytes.
//!
//! It does not interpret the bytes. Invariants: memory is bounded, whatever a client sends; while a client does not
//! read, nothing is read from it. Message boundaries are ignored: a stream has none.

use std::io::{self, Error, ErrorKind};

use axum::http::HeaderMap;
use axum::http::header::{HeaderValue, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL, SEC_WEBSOCKET_VERSION, UPGRADE};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;

/// The suffix that is appended to a client's key (1.3).
const KEY_SUFFIX: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// Kinds of frames (5.2).
const CONTINUATION: u8 = 0;
const BINARY: u8 = 2;
const CLOSE: u8 = 8;
const PING: u8 = 9;
const PONG: u8 = 10;

/// Bits of a frame's first two bytes.
const LAST: u8 = 0x80;
const RESERVED: u8 = 0x70;
const MASKED: u8 = 0x80;

/// Maximum length of a received frame: browsers fragment longer messages, and noVNC sends less than 64 KiB.
const FRAME_MAX: u64 = 1 << 20;

/// Maximum length of a control frame (5.5).
const CONTROL_MAX: u64 = 125;

/// Maximum bytes sent in one frame.
const PIECE: usize = 32 << 10;

/// Maximum number of queued replies to control frames.
const REPLIES_MAX: usize = 4;

/// "The endpoint is going away" (7.4.1).
const GOING_AWAY: [u8; 2] = 1001_u16.to_be_bytes();

/// The header that accepts a client's handshake (4.2.2); `None` if the request is not a handshake.
pub fn accept(headers: &HeaderMap) -> Option<HeaderValue> {
    let is_websocket = headers.get(UPGRADE)?.as_bytes().eq_ignore_ascii_case(b"websocket");
    let is_known = headers.get(SEC_WEBSOCKET_VERSION)?.as_bytes() == b"13";
    let key = headers.get(SEC_WEBSOCKET_KEY).filter(|_| is_websocket && is_known)?.to_str().ok()?;
    let hash = digest(&SHA1_FOR_LEGACY_USE_ONLY, format!("{key}{KEY_SUFFIX}").as_bytes());
    HeaderValue::from_str(&BASE64_STANDARD.encode(hash)).ok()
}

/// The subprotocols that a client offers, in its order of preference.
pub fn offered(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let values = headers.get_all(SEC_WEBSOCKET_PROTOCOL).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim)
}

/// Relays bytes between a client and a stream until one of them ends.
pub async fn relay(client: impl AsyncRead + AsyncWrite, stream: impl AsyncRead + AsyncWrite) -> io::Result<()> {
    let (mut from_client, mut to_client) = tokio::io::split(client);
    let (mut from_stream, mut to_stream) = tokio::io::split(stream);
    let (replies, mut to_reply) = mpsc::channel::<(u8, Vec<u8>)>(REPLIES_MAX);
    let send_all = async {
        let mut piece = vec![0; PIECE];
        loop {
            tokio::select! {
                read = from_stream.read(&mut piece) => match read? {
                    0 => return send(&mut to_client, CLOSE, &GOING_AWAY).await,
                    len => send(&mut to_client, BINARY, &piece[..len]).await?,
                },
                Some((kind, content)) = to_reply.recv() => {
                    send(&mut to_client, kind, &content).await?;
                    if kind == CLOSE {
                        return Ok(());
                    }
                }
            }
        }
    };
    let receive_all = async {
        while let Some((kind, content)) = receive(&mut from_client).await? {
            match kind {
                BINARY | CONTINUATION => to_stream.write_all(&content).await?,
                PING => replies.send((PONG, content)).await.map_err(Error::other)?,
                CLOSE => {
                    replies.send((CLOSE, content)).await.map_err(Error::other)?;
                    // The other half ends when the reply is sent.
                    return std::future::pending().await;
                }
                PONG => {}
                other => return Err(malformed(&format!("a frame of the kind {other}, not a binary one"))),
            }
        }
        Ok(())
    };
    tokio::select! {
        sent = send_all => sent,
        received = receive_all => received,
    }
}

fn malformed(what: &str) -> Error {
    Error::new(ErrorKind::InvalidData, format!("the client has sent {what}"))
}

/// Sends a frame, unmasked as required of servers (5.1).
async fn send(to: &mut (impl AsyncWrite + Unpin), kind: u8, content: &[u8]) -> io::Result<()> {
    let mut frame = vec![LAST | kind];
    match (u8::try_from(content.len()), u16::try_from(content.len())) {
        (Ok(len @ ..=125), _) => frame.push(len),
        (_, Ok(len)) => frame.extend([&[126][..], &len.to_be_bytes()].concat()),
        _ => frame.extend([&[127][..], &(content.len() as u64).to_be_bytes()].concat()),
    }
    frame.extend(content);
    to.write_all(&frame).await?;
    to.flush().await
}

/// The opcode and payload of the next frame; `None` at the end of the connection.
async fn receive(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<(u8, Vec<u8>)>> {
    let mut head = [0; 2];
    if from.read(&mut head[..1]).await? == 0 {
        return Ok(None);
    }
    from.read_exact(&mut head[1..]).await?;
    let [first, second] = head;
    let kind = first & !(LAST | RESERVED);
    if first & RESERVED != 0 || second & MASKED == 0 {
        return Err(malformed("a frame that is not masked, or of an extension"));
    }
    let len = match second & !MASKED {
        126 => from.read_u16().await?.into(),
        127 => from.read_u64().await?,
        len => len.into(),
    };
    let is_control = kind >= CLOSE;
    if len > if is_control { CONTROL_MAX } else { FRAME_MAX } || is_control && first & LAST == 0 {
        return Err(malformed(&format!("a frame of {len} bytes")));
    }
    let mut mask = [0; 4];
    from.read_exact(&mut mask).await?;
    let mut content = vec![0; usize::try_from(len).map_err(Error::other)?];
    from.read_exact(&mut content).await?;
    content.iter_mut().zip(mask.iter().cycle()).for_each(|(byte, mask)| *byte ^= mask);
    Ok(Some((kind, content)))
}

#[cfg(test)]
mod test {
    use tokio::io::{DuplexStream, duplex};
    use tokio::task::JoinHandle;

    use super::*;

    /// A frame as a client sends it.
    fn frame(first: u8, content: &[u8]) -> Vec<u8> {
        let mask = [7, 0, 255, 1];
        let mut frame = vec![first];
        match u8::try_from(content.len()) {
            Ok(len @ ..=125) => frame.push(MASKED | len),
            _ => {
                frame.push(MASKED | 126);
                frame.extend(u16::try_from(content.len()).unwrap().to_be_bytes());
            }
        }
        frame.extend(mask);
        frame.extend(content.iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask));
        frame
    }

    fn relayed() -> (DuplexStream, DuplexStream, JoinHandle<io::Result<()>>) {
        let ((client, near), (far, stream)) = (duplex(1 << 16), duplex(1 << 16));
        (client, stream, tokio::spawn(relay(near, far)))
    }

    async fn read(from: &mut DuplexStream, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        from.read_exact(&mut bytes).await.unwrap();
        bytes
    }

    #[test]
    fn the_handshake_of_the_rfc_is_accepted() {
        let pairs = [("upgrade", "WebSocket"), ("sec-websocket-version", "13")];
        let key = ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==");
        let headers = |pairs: &[(&'static str, &'static str)]| {
            pairs.iter().map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value))).collect()
        };
        let whole: HeaderMap = headers(&[pairs[0], pairs[1], key]);
        assert_eq!(accept(&whole).unwrap(), "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
        for missing in [[pairs[0], pairs[1]], [pairs[0], key], [pairs[1], key]] {
            assert_eq!(accept(&headers(&missing)), None, "{missing:?}");
        }
        let mut protocols: HeaderMap = headers(&[("sec-websocket-protocol", "a, b")]);
        protocols.append(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static("c"));
        assert_eq!(offered(&protocols).collect::<Vec<_>>(), ["a", "b", "c"]);
    }

    #[test]
    fn base64_has_the_padding_of_the_rfc() {
        let all = ["", "f", "fo", "foo", "foob"].map(|text| BASE64_STANDARD.encode(text));
        assert_eq!(all, ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg=="]);
    }

    #[tokio::test]
    async fn bytes_are_relayed_in_both_directions_without_their_frames() {
        let (mut client, mut stream, _relay) = relayed();
        let long: Vec<u8> = (0..=255).cycle().take(1000).collect();
        client.write_all(&frame(BINARY, b"he")).await.unwrap();
        client.write_all(&frame(LAST | CONTINUATION, b"llo")).await.unwrap();
        client.write_all(&frame(LAST | BINARY, &long)).await.unwrap();
        assert_eq!(read(&mut stream, 5).await, b"hello");
        assert_eq!(read(&mut stream, 1000).await, long);
        stream.write_all(b"RFB").await.unwrap();
        assert_eq!(read(&mut client, 5).await, [&[LAST | BINARY, 3][..], b"RFB"].concat());
        stream.write_all(&long).await.unwrap();
        assert_eq!(read(&mut client, 1004).await, [&[LAST | BINARY, 126, 3, 232][..], &long].concat());
    }

    #[tokio::test]
    async fn a_ping_is_answered_and_a_close_ends_the_relay() {
        let (mut client, _stream, relay) = relayed();
        client.write_all(&frame(LAST | PING, b"x")).await.unwrap();
        assert_eq!(read(&mut client, 3).await, [LAST | PONG, 1, b'x']);
        client.write_all(&frame(LAST | CLOSE, &[3, 232])).await.unwrap();
        assert_eq!(read(&mut client, 4).await, [LAST | CLOSE, 2, 3, 232]);
        relay.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn the_end_of_either_side_ends_the_relay() {
        let (mut client, stream, relay) = relayed();
        drop(stream);
        assert_eq!(read(&mut client, 4).await, [LAST | CLOSE, 2, 3, 233]);
        relay.await.unwrap().unwrap();
        let (client, _stream, relay) = relayed();
        drop(client);
        relay.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn malformed_frames_end_the_relay() {
        let too_long = [&[LAST | BINARY, MASKED | 127][..], &(FRAME_MAX + 1).to_be_bytes()].concat();
        let long_ping = [LAST | PING, MASKED | 126, 1, 0].to_vec();
        let all = [
            frame(LAST | 1, b"text"),
            frame(LAST | 0x40 | BINARY, b""),
            frame(PING, b""),
            too_long,
            long_ping,
            vec![LAST | BINARY, 1, b'x'],
            frame(LAST | 3, b""),
        ];
        for malformed in all {
            let (mut client, _stream, relay) = relayed();
            client.write_all(&malformed).await.unwrap();
            let error = relay.await.unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{malformed:?}: {error}");
        }
    }
}
