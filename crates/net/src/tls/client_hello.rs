//! The server name in a client's first TLS message, without a handshake.
//!
//! TLS libraries reject some names that nodes have, such as `worker-7.9`. TLS that is passed through needs only the
//! bytes of the name, so they are read here (RFC 8446, sections 4.1.2 and 5.1; RFC 6066, section 3).

/// A complete ClientHello.
#[derive(Debug, PartialEq, Eq)]
pub struct ClientHello {
    /// The server name (SNI) as sent; it may not be a valid name.
    pub server_name: Option<String>,
}

/// The bytes are not the start of a TLS connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no valid TLS ClientHello")]
pub struct NotTls;

impl ClientHello {
    /// Parses the first bytes of a connection. Returns `None` if more are needed.
    ///
    /// # Errors
    ///
    /// Returns an error as soon as the bytes cannot become a ClientHello.
    pub fn parse(received: &[u8]) -> Result<Option<Self>, NotTls> {
        let Some(message) = message(received)? else { return Ok(None) };
        let extensions = extensions(&message).ok_or(NotTls)?;
        Ok(Some(Self { server_name: server_name(extensions)? }))
    }
}

/// Returns the body of the first handshake message, joined from its records, or `None` if it is incomplete.
fn message(received: &[u8]) -> Result<Option<Vec<u8>>, NotTls> {
    let mut rest = HelloReader(received);
    let mut joined = Vec::new();
    loop {
        match joined.split_first_chunk() {
            Some(([CLIENT_HELLO, high, middle, low], body)) => {
                let length = usize::from(*high) << 16 | usize::from(*middle) << 8 | usize::from(*low);
                if let Some(body) = body.get(..length) {
                    return Ok(Some(body.to_vec()));
                }
            }
            Some(_) => return Err(NotTls),
            None => {}
        }
        // Before the record is complete, so that another protocol is recognised by its first bytes.
        if rest.0.iter().zip(RECORD).any(|(is, must)| *is != must) {
            return Err(NotTls);
        }
        let record = rest.take(RECORD.len() + 1).and_then(|_| rest.list(2));
        match record {
            Some(HelloReader([])) => return Err(NotTls),
            Some(HelloReader(piece)) => joined.extend_from_slice(piece),
            None => return Ok(None),
        }
    }
}

/// Returns the extensions of a ClientHello, which may have none.
fn extensions(body: &[u8]) -> Option<HelloReader<'_>> {
    let mut rest = HelloReader(body);
    rest.take(VERSION + RANDOM)?;
    for width in [SESSION_ID, CIPHER_SUITES, COMPRESSION] {
        rest.list(width)?;
    }
    if rest.0.is_empty() { Some(rest) } else { rest.list(2) }
}

/// Returns the only server name in the extensions. Two would mean different nodes to different programs.
fn server_name(mut rest: HelloReader<'_>) -> Result<Option<String>, NotTls> {
    let mut found = None;
    while !rest.0.is_empty() {
        let (kind, extension) = rest.take(2).zip(rest.list(2)).ok_or(NotTls)?;
        if kind != SERVER_NAME {
            continue;
        }
        let mut names = { extension }.list(2).ok_or(NotTls)?;
        let (kind, name) = names.take(1).zip(names.list(2)).ok_or(NotTls)?;
        if found.is_some() || !names.0.is_empty() || kind != HOST_NAME || name.0.is_empty() {
            return Err(NotTls);
        }
        found = Some(String::from_utf8_lossy(name.0).into_owned());
    }
    Ok(found)
}

/// The unread part of a message.
struct HelloReader<'a>(&'a [u8]);

impl<'a> HelloReader<'a> {
    /// Takes `count` bytes, or returns `None` if there are fewer.
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    /// Takes a list, which starts with its length in `width` bytes.
    fn list(&mut self, width: usize) -> Option<Self> {
        let length = self.take(width)?.iter().fold(0, |length, byte| length << 8 | usize::from(*byte));
        self.take(length).map(Self)
    }
}

/// Start of a record with a handshake message: its type, and the major version.
const RECORD: [u8; 2] = [22, 3];
/// Type of the message.
const CLIENT_HELLO: u8 = 1;

// Lengths in bytes of the fields before the extensions; for lists, of their length.
const VERSION: usize = 2;
const RANDOM: usize = 32;
const SESSION_ID: usize = 1;
const CIPHER_SUITES: usize = 2;
const COMPRESSION: usize = 1;

/// Type of the extension, and of a name in it.
const SERVER_NAME: &[u8] = &[0, 0];
const HOST_NAME: &[u8] = &[0];

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore};

    use super::*;

    /// Returns the ClientHello that rustls sends for a server's name or address.
    fn hello(server: &str) -> Vec<u8> {
        let config = ClientConfig::builder().with_root_certificates(RootCertStore::empty());
        let name = server.to_owned().try_into().unwrap();
        let mut client = ClientConnection::new(Arc::new(config.with_no_client_auth()), name).unwrap();
        let mut bytes = Vec::new();
        client.write_tls(&mut bytes).unwrap();
        bytes
    }

    /// Cuts the only record of these bytes into records with at most `most` bytes each.
    fn in_records(bytes: &[u8], most: usize) -> Vec<u8> {
        let pieces = bytes[5..].chunks(most);
        pieces
            .flat_map(|piece| [&[22, 3, 1, 0, u8::try_from(piece.len()).unwrap()], piece].concat())
            .collect()
    }

    fn name(bytes: &[u8]) -> Result<Option<Option<String>>, NotTls> {
        Ok(ClientHello::parse(bytes)?.map(|hello| hello.server_name))
    }

    #[test]
    fn the_server_name_is_read_once_the_hello_is_complete_however_it_is_split() {
        for (server, found) in [("Node1.example.org", Some("Node1.example.org")), ("192.0.2.1", None)] {
            let whole = hello(server);
            for bytes in [whole.clone(), in_records(&whole, 1), in_records(&whole, 100)] {
                assert_eq!(name(&bytes), Ok(Some(found.map(str::to_owned))), "{server}");
                assert_eq!(name(&[&bytes[..], b"more"].concat()), Ok(Some(found.map(str::to_owned))));
                for end in 0..bytes.len() {
                    assert_eq!(name(&bytes[..end]), Ok(None), "{server} {end}");
                }
            }
        }
    }

    #[test]
    fn any_name_is_returned_as_it_was_sent() {
        for odd in ["node-7.9", "192.0.2.33", "a..b", "\0bad"] {
            let stand_in = "y".repeat(odd.len());
            let mut bytes = hello(&stand_in);
            let at = bytes.windows(odd.len()).position(|bytes| bytes == stand_in.as_bytes()).unwrap();
            bytes[at..at + odd.len()].copy_from_slice(odd.as_bytes());
            assert_eq!(name(&bytes), Ok(Some(Some(odd.to_owned()))));
        }
    }

    #[test]
    fn bytes_that_cannot_become_a_hello_are_refused_at_once() {
        for bytes in [
            &b"GET / HTTP/1.1\r\n"[..],
            b"SSH-2.0-x\r\n",
            b"G",
            &[22, 2],
            &[22, 3, 1, 0, 0],
            &[22, 3, 1, 0, 4, 2, 0, 0, 0],
            &[22, 3, 1, 0, 5, 1, 0, 0, 1, 3],
        ] {
            assert_eq!(name(bytes), Err(NotTls), "{bytes:?}");
        }
    }

    #[test]
    fn two_server_names_are_refused() {
        let entry = [&[0, 0, 2], &b"n1"[..]].concat();
        let extension = |entries: &[u8]| {
            let length = u8::try_from(entries.len()).unwrap();
            [&[0, 0, 0, length + 2, 0, length], entries].concat()
        };
        let name = |extensions: &[u8]| server_name(HelloReader(extensions));
        assert_eq!(name(&extension(&entry)), Ok(Some("n1".to_owned())));
        assert_eq!(name(&extension(&[&entry[..], &entry].concat())), Err(NotTls));
        assert_eq!(name(&[extension(&entry), extension(&entry)].concat()), Err(NotTls));
    }

    proptest! {
        #[test]
        fn parsing_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200), at in 0_usize..300) {
            let mut changed = hello("node1");
            let end = changed.len().min(at + bytes.len());
            changed[at.min(end)..end].copy_from_slice(&bytes[..end - at.min(end)]);
            let _ = (name(&bytes), name(&changed));
        }
    }
}
