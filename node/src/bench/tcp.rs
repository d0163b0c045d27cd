//! Bytes over one TCP connection of the loopback device, from memory to memory: the limit without verifying, encrypting
//! or keeping them.

use anyhow::{Context, ensure};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

const BUFFER_LEN_BYTES: usize = 1 << 20;

/// How long `bytes` take.
///
/// # Errors
/// When the loopback device does not carry them.
pub(super) fn copy(bytes: &[u8]) -> anyhow::Result<Duration> {
    let listener = TcpListener::bind("127.0.0.1:0").context("cannot listen on loopback")?;
    let address = listener.local_addr()?;
    std::thread::scope(|scope| {
        let sender = scope.spawn(move || {
            let (mut to, _) = listener.accept()?;
            to.write_all(bytes)
        });
        let mut from = TcpStream::connect(address)?;
        let mut buffer = vec![0; BUFFER_LEN_BYTES];
        let (begin, mut got) = (Instant::now(), 0);
        loop {
            match from.read(&mut buffer)? {
                0 => break,
                n => got += n,
            }
        }
        let took = begin.elapsed();
        sender.join().ok().context("the sender panicked")??;
        ensure!(got == bytes.len(), "{got} of {} bytes came", bytes.len());
        Ok(took)
    })
}
