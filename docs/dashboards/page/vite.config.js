import react from '@vitejs/plugin-react';
import { defineConfig } from 'vite';

export default defineConfig({
  base: './',
  plugins: [react()],
  define: { 'process.env': {}, global: 'globalThis' },
  build: { chunkSizeWarningLimit: 20000, minify: false },
});
